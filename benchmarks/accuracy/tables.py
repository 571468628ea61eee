"""From the result files to the pages of ``docs/results``.

A page without results is not written, and a table that is not complete is left out.
"""

from __future__ import annotations

import json
import math
import statistics

import ablation
import bands
from accuracy import TUNING_SEED, key, machine_file, read, rows
from arms import PUBLIC_IMAGES, TABLES, trials

BASELINE = "dp-sgd"
#: Two-sided 95 % quantiles of Student's t, by number of seeds.
T_QUANTILES = {3: 4.303, 5: 2.776}

SOURCE = """\
Made by `benchmarks/accuracy/accuracy.py`; trials, settings and seeds are in
`benchmarks/accuracy/results`.
"""
NOT_COUNTED = """\
Choosing settings by results on a validation split is not counted in epsilon, here as in
the papers: the data sets are public benchmarks.
"""
HEADS = {
    "accuracy": f"""\
# Accuracy at equal privacy

{SOURCE}
Protocol: Poisson sampling, PLD accounting, zero-out adjacency (the number of examples
is public). Tuning trains on 55 000 of the 60 000 training images and scores on the
other 5 000, by code that does not open the test file. Trials are drawn before anything
is trained; the best three of an arm get two more seeds, and the best mean is taken.
Then everything is fixed and tested once, with five seeds that vary initialisation,
sampling and noise and are the same for all arms. The noise of these runs comes from a
seed, so that arms are paired; it has the same law as that of a private run.

`dp-kfc paper` is what the mode `paper` was then: Adam, relative damping, noise of power
3, one probe batch every 100 steps. The mode now has what the paper states (SGD with
momentum 0.9, absolute damping, power 1, ten batches every 50 steps), which these rows
do not measure.

{NOT_COUNTED}""",
    "strong_baseline": f"""\
# Accuracy beside a strong baseline

{SOURCE}
What makes plain DP-SGD strong, given to all arms: tanh instead of relu, a large batch,
many epochs and normalised clipping, whose bound (1) is no setting to search. Otherwise
the protocol is that of [accuracy at equal privacy](accuracy.md).

{NOT_COUNTED}""",
    "dp_ngd": f"""\
# DP-NGD and public images

{SOURCE}
What {PUBLIC_IMAGES} public images are worth: as probes of `dp-ngd`, as probes of a
diagonal map, or not at all, with synthetic probes or none. The images are of
Tiny-ImageNet, cut and normalised as the private data is (grey and the middle 28 x 28
for FashionMNIST); all of them are used at every refresh, with labels drawn from the
model. Synthetic probes are as many.

The protocol is that of [accuracy at equal privacy](accuracy.md) with three paired
seeds. Every arm is tuned at epsilon 1, with a refresh every 32 steps, and the settings
found there are tested at both. Most of the first eight trials of `dp-sgd`, `dp-kfc` and
the diagonal map turned out to have steps that are too short, so these arms have eight
more with longer ones, and were tested again with what validation then chose; `dp-ngd`
has its first eight. Rows without trials take the settings of `dp-ngd public` but for
what they name. A diverged run is scored by the net as it then stands. Where a table
says that its floor moves at every step, every arm has four trials instead.

{NOT_COUNTED}""",
    "dp_ngd_choices": f"""\
# Two choices of DP-NGD

{SOURCE}
Tables 3 and 4 of the DP-NGD paper in short, measured anew: what becomes of it when its
curvature is measured on the private data and paid for, and when gradients are clipped
before or after the map instead of in the whitened space. Private factors are released
with the gradient in one event and have a share of its squared clip bound (the paper
splits the budget in two). {PUBLIC_IMAGES} public images otherwise, as in [DP-NGD and
public images](dp_ngd.md); every arm has eight trials and three paired seeds. The
paper's nets, batches and recipe are others (WRN-16-4 or ResNet-20, 4 096, 16 views), so
its figures are beside ours for their order.

{NOT_COUNTED}""",
    "rivals": f"""\
# Rivals of DP-KFC on MNIST

{SOURCE}
Tables 1 and 6 of the DP-KFC paper, measured anew with valid accounting: every method as
its authors describe it, its examples clipped, its noise paid for. Each arm is tuned at
epsilon 1 and at epsilon 8 by the protocol of [accuracy at equal privacy](accuracy.md);
the best two of an arm get the two more seeds. The settings of epsilon 1 are tested at 1
and 2, those of 8 at 5 and 8. "Public" means {PUBLIC_IMAGES} grey images of
Tiny-ImageNet, where the paper has a proxy that is nearer to MNIST. The paper's figures
are of RDP with delta 1/N, and of shuffled batches accounted as Poisson samples: its
epsilons are not comparable with those here.

Learning rates are searched in one unit for all arms but Adam's: the way that parameters
go, in the long run, for a mean gradient as long as the clip norm, from 0.1 to 5 (GEP,
whose best was at the end, to 20). Trials are spread evenly over a range. "Averaged" is
the same recipe with an exponential average of its iterates as the result; for
`dp-kfc+disk` it is a second search, around the best of the first one. AdaDPS has its
authors' damping, 1e-10, or, "damped", one that is searched as other arms' is.

Of all arms the validation split puts `dp-kfc+disk` first at epsilon 1, and the second
search of it at epsilon 8.

{NOT_COUNTED}""",
    "correlated": f"""\
# Correlated noise on CIFAR-10

{SOURCE}
Table 1b of the NoiseCurve paper in our own protocol: `small-cnn`, groups that take
turns (as many as bands), their cost by PLD. Every arm is tuned at each epsilon on a
grid of sixteen trials, with one seed: four learning rates times four numbers of bands,
or for `dp-sgd` times momentum and clip rule. (Three arms of one table had chosen their
lowest rate, and got one below it: the choice stayed.) "Synthetic" and "public" say
where the eigenvalues come from. With one band noise is independent, and `dp-bandmf` and
`noisecurve` are the same run. `dp-kfc+noisecurve` takes its map from what DP-NGD's
table chose for `dp-kfc`.

Tables without "pretrained" start at random. The others start from one net that SimCLR
has trained on 6 000 images of Tiny-ImageNet without labels, as the paper does, whose
figures are beside them; a seed varies sampling and noise there. The paper trains 20
epochs with batches of 450 and without momentum, and tunes by Optuna; its code is not
public, and the sizes that it leaves open are ours.

Nine of the 150 test runs were made on a CPU, whose noise is of another stream: those of
`noisecurve synthetic`, not pretrained, at epsilon 5 with seeds 3 and 4, and of
`dp-kfc+noisecurve` at epsilon 1 with seed 4, at epsilon 2 with seeds 0 and 4, and
pretrained at epsilon 1 with seeds 2 and 3, at epsilon 5 with seeds 1 and 2.

{NOT_COUNTED}""",
    "ablation": f"""\
# What each setting of dp-kfc does

{SOURCE}
The base is what the search of [accuracy at equal privacy](accuracy.md) chose for
`dp-kfc` on each data set; each row changes one thing. For every row the learning rate
is searched anew, on a grid of factors of the base's with one seed; a grid whose best is
at its end is continued. The best factor gets two more seeds.

**These are validation scores**, of 5 000 training images that were held out: the test
files were not opened. One of the three seeds also chose the factor, so means are a
little high, for all rows alike. A difference to the base is paired by seed.

{NOT_COUNTED}""",
}


#: After the tables of correlated noise.
READING = """\
## How to read this

The order that we find is `dp-kfc+noisecurve`, `dp-sgd`, and then `dp-bandmf` and
`noisecurve`, which differ by less than their spread. The paper has `dp-sgd` last and
`noisecurve` first. What is behind that:

- **Momentum.** The paper has none in any arm. Here `dp-sgd` may choose it, and does
  everywhere: on validation it is worth 7 points at best (epsilon 2 and 5), and none at
  worst (pretrained, epsilon 1). The arms with correlated noise have none, since their
  noise is designed for plain steps. With one band and without a map they are `dp-sgd`
  with normalised clipping and without momentum, 4 to 11 points below it on the test.
- **What groups cost.** Noise that reaches over b steps cancels most of itself, but an
  example that takes its turn every b steps is sampled at b times the rate, and loses
  most of the amplification. At epsilon 1 the two nearly even out (first table above):
  5 % of the squared error is all there is to gain, and every search chooses one band.
  With the paper's batch and steps (450 and 2 000, of 45 000 examples) it would be 9 %
  with 4 bands and 6 % with 10; at epsilon 2 a quarter, at epsilon 5 more than half.
- **The error of a net is not that of a quadratic.** More bands are more noise in every
  single step (at epsilon 5 a multiplier of 1.9 with 16 bands in place of 0.8) that
  later ones take back. The prediction does not mind how far the net is carried off
  meanwhile; the gradients that are taken there do. So 16 bands are worse than 4
  nearly everywhere, and where half of the squared error should go (epsilon 5) the best
  number of bands is worth 0 to 2 points on validation.
- **Eigenvalues.** A design for the spectrum at the start is no better here than one for
  prefix sums at the same number of bands (second table above), with eigenvalues from
  public images or from noise.
- **Whitening** is what moves accuracy: with the map, plain steps are 2 to 5 points
  above `dp-sgd` with momentum, at every epsilon and from both starts.
"""


def write(results, pages):
    """Every page that has results."""
    chosen = json.loads((results / "chosen.json").read_text(encoding="utf-8"))
    tested = list(read(results / "test.jsonl").values())
    ablated = read(results / "ablation.jsonl")
    sections = {page: [] for page in HEADS}
    for table, about in TABLES.items():
        if _complete(table, chosen, tested):
            sections[about.page].append(section(table, about, chosen, tested))
    for table in ablation.TABLES_OF:
        found = ablation_section(table, chosen, ablated)
        if found:
            sections["ablation"].append(found)
    searched = bands.section(read(results / "tuning.jsonl"), key, TUNING_SEED)
    if searched and sections[bands.PAGE]:
        sections[bands.PAGE] += [searched, READING]
    pages.mkdir(parents=True, exist_ok=True)
    for page, parts in sections.items():
        if parts:
            text = "\n".join([HEADS[page], *parts, made_on(results, page)])
            (pages / f"{page}.md").write_text(text, encoding="utf-8")


def made_on(results, page):
    machine = json.loads((results / machine_file(page)).read_text(encoding="utf-8"))
    return (
        f"Machine: {machine['device']}; torch {machine['torch']}, Python "
        f"{machine['python']}; {machine['date']}.\n"
    )


# -- tables with a test ----------------------------------------------------------------


def _scores(table, names, records):
    """Per cent by row and seed."""
    scores = {name: {} for name in names}
    for record in records:
        if record["table"] == table and record["arm"] in scores:
            scores[record["arm"]][record["seed"]] = 100 * record["accuracy"]
    return scores


def _complete(table, chosen, records):
    """All arms are chosen, and every row has all of its seeds, or none yet."""
    about = TABLES[table]
    if chosen.get(about.tuned_in or table, {}).keys() != about.arms.keys():
        return False
    scores = _scores(table, rows(chosen, table), records)
    seeds = {len(own) for own in scores.values()}
    return len(scores[BASELINE]) == about.seeds and seeds <= {0, about.seeds}


def section(table, about, chosen, records):
    found = rows(chosen, table)
    arms = chosen[about.tuned_in or table]
    scores = _scores(table, found, records)
    own = [r for r in records if r["table"] == table and r["arm"] in found]
    net = "".join(f", {name} {value}" for name, value in about.options.items())
    lines = [
        f"## {table}",
        "",
        f"Net `{about.model}`{net}, epsilon {about.epsilon:g}, delta "
        f"{about.delta:g}, batch {about.batch_size}, {about.epochs} epochs "
        f"({own[0]['steps']} steps, noise {_multipliers(own)}).",
        "",
        *([about.note] if about.note else []),
        "| arm | test accuracy, % | spread | seeds | above dp-sgd, paired (95 %) | "
        + ("the paper's | " if about.paper else "")
        + "validation | trials | chosen |",
        "|---|--:|--:|--:|--:|" + ("--:|" if about.paper else "") + "--:|--:|---|",
    ]
    order = {r: statistics.mean(own.values() or [0]) for r, own in scores.items()}
    for row in sorted(order, key=order.__getitem__, reverse=True):
        values = list(scores[row].values())
        tuned = row in arms
        validation = f"{100 * arms[row]['validation']:.2f}" if tuned else ""
        count = len(trials(about.tuned_in or table, row)) if tuned else ""
        compared = bool(values) and row != BASELINE
        above = _above(scores[row], scores[BASELINE]) if compared else ""
        measured = (
            f"{statistics.mean(values):.2f} | {statistics.stdev(values):.2f}"
            if values
            else "not tested | "
        )
        lines.append(
            f"| {row} | {measured} | {len(values)} | {above} | "
            + (f"{about.paper.get(row, '')} | " if about.paper else "")
            + f"{validation} | {count} | "
            f"{_told(row, found, about)} |"
        )
    outside = [
        f"{arm}: {name}"
        for arm, entry in arms.items()
        for name, good in entry["inside"].items()
        if not good
    ]
    said = "; ".join(outside) if outside else "none"
    lines += ["", f"Best trials at the edge of a searched range: {said}.", ""]
    diverged = [f"{r['arm']} (seed {r['seed']})" for r in own if "error" in r]
    if diverged:
        lines += [f"Diverged: {', '.join(sorted(diverged))}.", ""]
    return "\n".join(lines)


def _multipliers(records):
    """One, or where they are of several numbers of bands, from which to which."""
    found = sorted({record["sigma"] for record in records})
    if len(found) == 1:
        return f"multiplier {found[0]:g}"
    return f"multipliers from {found[0]:g} to {found[-1]:g}, by bands"


def _told(row, found, about):
    """The settings of a row; of one that is not tuned, what differs from its arm."""
    if row in about.untuned:
        arm, changed = about.untuned[row]
        return f"as {arm}, " + ", ".join(f"{k} {v}" for k, v in changed.items())
    settings = {k: v for k, v in found[row].items() if k != "recipe"}
    return ", ".join(
        f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in settings.items()
    )


def _above(scores, others):
    """Mean of paired differences and half of its interval."""
    pairs = [scores[s] - v for s, v in others.items() if s in scores]
    half = T_QUANTILES[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{statistics.mean(pairs):+.2f} +- {half:.2f}"


# -- the ablation ----------------------------------------------------------------------


def ablation_section(table, chosen, done):
    """None while a variant is not complete."""
    if "dp-kfc" not in chosen.get(table, {}):
        return None
    own = ablation.base(chosen, table)
    variants = ablation.variants(chosen, table)
    found = {
        name: ablation.outcome(table, settings, done, key)
        for name, settings in variants.items()
    }
    base = ablation.outcome(table, own, done, key)
    if base is None or any(one is None for one in found.values()):
        return None
    about = TABLES[table]
    told = ", ".join(f"{k} {v}" for k, v in own.items() if k != "recipe")
    lines = [
        f"## {table}",
        "",
        f"Net `{about.model}`, epsilon {about.epsilon:g}, delta {about.delta:g}, batch "
        f"{about.batch_size}, {about.epochs} epochs. Base: {told}.",
        "",
        "| varied | value | validation accuracy, % | spread | seeds | above the base, "
        "paired (95 %) | learning rate, factor | factors tried |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
        _ablated("base", "", base, None),
    ]
    for (what, label), one in found.items():
        if variants[what, label] == own:
            lines.append(_ablated(what, f"{label} (base)", one, None))
        else:
            lines.append(_ablated(what, label, one, base))
    at_the_end = [
        f"{what} {label}"
        for (what, label), one in found.items()
        if one["factor"] in one["searched"]
    ]
    said = "; ".join(at_the_end) if at_the_end else "none"
    lines += ["", f"Best factors at the end of what was tried: {said}.", ""]
    return "\n".join(lines)


def _ablated(what, label, one, base):
    scores = {seed: 100 * score for seed, score in one["by_seed"].items()}
    above = ""
    if base is not None:
        others = {seed: 100 * score for seed, score in base["by_seed"].items()}
        above = _above(scores, others)
    low, high = one["searched"]
    return (
        f"| {what} | {label} | {100 * one['mean']:.2f} | "
        f"{statistics.stdev(scores.values()):.2f} | {len(scores)} | {above} | "
        f"{one['factor']:g} | {low:g} to {high:g} |"
    )
