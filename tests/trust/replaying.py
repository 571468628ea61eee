"""Record and replay over everything that can be chosen; figures for the page."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils.data import Subset, TensorDataset

from curvedp import RECIPES, Trainer, make_private
from curvedp.layers import Batch
from curvedp.noise import CorrelatedMechanism, GaussianMechanism
from curvedp.probes import PublicProbe
from curvedp.testing.neighbours import (
    Figures,
    Replay,
    WatchedData,
    distance,
    try_neighbours,
)
from curvedp.train.losses import LOSSES

from ..train.test_graph import Twin
from . import nets

#: What is printed may be above 1 by the rounding of a float32 sum of the batch.
LIMIT = 1.000001

PRIVATE = [name for name, recipe in RECIPES.items() if recipe.private]


@dataclass(frozen=True)
class Case:
    """A run to replay.

    Attributes:
        recipe: its name.
        net: of :data:`curvedp` nets in ``nets``.
        tier: "loop" or "train_on".
        options: of ``make_private``; None leaves one out.
        passed: how ``train_on`` computes: "" as it is written, "traced" the graph that
            a compiler is given, "graphed" the operations that a CUDA graph records,
            "remade" with inputs that are made again, as in large passes.
    """

    recipe: str
    net: str = "mlp"
    tier: str = "loop"
    options: dict = field(default_factory=dict)
    passed: str = ""

    def __str__(self) -> str:
        plain = {k: v for k, v in self.options.items() if isinstance(v, str | int)}
        said = "-".join(f"{k}={v}" for k, v in plain.items())
        parts = (self.recipe, self.net, self.tier, self.passed, said)
        return "-".join(filter(None, parts))


def public(net):
    examples = nets.data(net, seed=9)  # the hostile ones come last
    return PublicProbe(Subset(examples, [k % nets.DRAWN for k in range(64)]))


def settings(recipe, net):
    found = {"loss": "cross-entropy", "noise_multiplier": 1.0, "sample_rate": 0.4,
             "steps": 4, "expected_batch_size": 9.6, "delta": 1e-5, "clip_norm": 0.3,
             "physical_batch_size": 16, "seed": 2}  # fmt: skip
    own = RECIPES[recipe]
    if own.pretraining is not None:
        found |= {"probes": public(net)}
    if own.correlation is not None:
        found |= {"bands": 2}
    if own.eigenvalues is not None:
        found |= {"spectrum_size": 16, "spectrum_top": 8}
    if own.curvature is not None and not own.curvature.from_releases:
        found |= {"probe_size": 8, "probe_batches": 2}
    return found


def synthesiser(net):
    """What a compiled pass is tried out on."""

    def made_up(size, generator):
        x, y = nets.data(net, seed=11).tensors
        rows = torch.randint(0, nets.DRAWN, (size,), generator=generator)
        return Batch(x[rows], y[rows])

    return made_up


def attach(case):
    model = nets.make(case.net)
    dataset = WatchedData(nets.data(case.net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = settings(case.recipe, case.net) | case.options
    options = {name: value for name, value in options.items() if value is not None}
    if not options.get("secure"):
        options["unsafe_reproducible_noise"] = 5
    private = make_private(model, optimizer, dataset, recipe=case.recipe, **options)
    engine, loss = private._engine, LOSSES[options["loss"]]
    if case.passed == "traced":
        private._passed = engine.compiled(loss, synthesiser(case.net), "eager")
    if case.passed == "remade":
        engine._precision.remade_from = 0
    if case.passed == "graphed":
        private._passed = engine.graphed(loss, Twin())
    watched = None if "people" in case.options else dataset
    return Replay(private, tier=case.tier, data=watched)


def replayed(case, *, steps=2, limit=None):
    """Neighbours of several steps of one run, at the parameters that it comes to."""
    replay, total = attach(case), Figures()
    people = case.options.get("people")
    units = nets.DRAWN + nets.SPARE if people is None else len(set(people))
    cut = nets.DRAWN if people is None else units // 2
    for _ in range(steps):
        assert set(replay.drawable) <= set(range(units))
        drawn = [unit for unit in replay.drawable if unit < cut]
        spare = [unit for unit in replay.drawable if unit >= cut]
        total += try_neighbours(replay, drawn, spare, limit=limit)
        replay.advance(drawn)
    return total


#: Everything besides the recipe that a step can be computed with, each alone.
VARIATIONS = [
    {},
    {"physical_batch_size": 3},
    {"physical_batch_size": 1},
    {"precision": "bf16"},
    {"precision": "bf16-kept"},
    {"norm_precision": "float32"},
    {"norm_precision": "bf16", "precision": "bf16", "physical_batch_size": 4},
    {"secure": True},
    {"clipping": "normalised"},
    {"clipping": "per-layer"},
    {"clipping": "adaptive"},
    {"people": [k // 2 for k in range(nets.DRAWN + nets.SPARE)],
     "examples_per_person": 2},
]  # fmt: skip
#: Size, rate and number of steps from the dataset: neighbours are zeroed out.
BY_SIZE = {"sample_rate": None, "steps": None, "expected_batch_size": None,
           "batch_size": 8, "epochs": 2}  # fmt: skip
#: Curvature from the private data, measured with noise beside the gradient.
MEASURED = {"probe": "private", "probe_size": None, "probe_batches": None}
#: Only for images.
OF_IMAGES = [{"augment": lambda x, generator: 0.5 * x, "views": 2}]


def fits(recipe, options):
    """Correlated noise is refused with a grid and with a threshold that moves.

    Parts that are clipped by themselves are refused with the latter as well.
    """
    moves, own = options.get("clipping") == "adaptive", RECIPES[recipe]
    if moves and own.curvature is not None and own.curvature.moments == "subspace":
        return False
    return own.correlation is None or not (moves or options.get("secure"))


def cases(recipes=None):
    """Every recipe on every net, with the variations in turn."""
    turn = itertools.cycle(VARIATIONS)
    for recipe in recipes or PRIVATE:
        for net in nets.NETS:
            for tier in ("loop", "train_on"):
                options = next(o for o in turn if fits(recipe, o))
                yield Case(recipe, net, tier, options)
    for options in VARIATIONS[1:]:
        for net in nets.NETS:
            yield Case("dp-sgd", net, "loop", options)
    for recipe in recipes or PRIVATE:
        yield Case(recipe, "mlp", "train_on", BY_SIZE)
    for passed, net in itertools.product(("traced", "graphed"), nets.NETS):
        for recipe in ("dp-sgd", "dp-kfc", "dp-bandmf"):
            yield Case(recipe, net, "train_on", {}, passed)
        low = {"precision": "bf16", "norm_precision": "bf16"}
        yield Case("dp-kfc", net, "train_on", low, passed)
    for recipe in ("dp-sgd", "dp-kfc", "dp-bandmf"):
        yield Case(recipe, "normed", "train_on", {}, "remade")
    for net in ("mlp", "conv"):
        yield Case("dp-kfc", net, "loop", MEASURED)
    yield Case("dp-sgd", "conv", "train_on", OF_IMAGES[0])


@contextmanager
def noted_sums():
    """Every sum that noise is added to, of whatever run."""
    found, kinds = [], (GaussianMechanism, CorrelatedMechanism)
    updates = [kind.update for kind in kinds]

    def noting(update):
        def noted(self, clipped, state):
            found.append(clipped)
            return update(self, clipped, state)

        return noted

    for kind, update in zip(kinds, updates, strict=True):
        kind.update = noting(update)
    try:
        yield found
    finally:
        for kind, update in zip(kinds, updates, strict=True):
            kind.update = update


def trained_sum(recipe, net, rows):
    """The first sum of a Trainer on these examples, all of which are drawn."""
    x, y = nets.data(net).tensors
    options = settings(recipe, net) | {"sample_rate": 1.0, "steps": 1}
    if "bands" in options:  # everybody is drawn: there is one group
        options |= {"bands": 1}
    loss = options.pop("loss")
    own = RECIPES[recipe].setting_names()
    given = {k: v for k, v in options.items() if k != "clip_norm" or k in own}
    trainer = Trainer(
        nets.make(net), loss, recipe=recipe, unsafe_reproducible_noise=5, **given
    )
    with noted_sums() as found:
        trainer.fit(TensorDataset(x[list(rows)], y[list(rows)]))
    return found[0]


def through_the_trainer(recipe, net="mlp", limit=4):
    """Neighbours that are trained on from the beginning: N is another one for them."""
    drawn = list(range(nets.DRAWN))
    base, worst, kinds = trained_sum(recipe, net, drawn), 0.0, {}
    for k in range(limit):
        spare = nets.DRAWN + k
        for kind, rows in (("removed", drawn[:k] + drawn[k + 1 :]),
                           ("added", [*drawn, spare])):  # fmt: skip
            other = trained_sum(recipe, net, rows)
            assert other.frame == base.frame, "the whitener depends on private data"
            ratio = distance(base, other) / base.bound
            kinds[kind] = max(kinds.get(kind, 0.0), ratio)
            worst = max(worst, ratio)
    return Figures(2 * limit, worst, kinds)


def everything(say=lambda text: None):
    """The long form: at least 10 000 neighbours."""
    total = Figures()
    for case in cases():
        found = replayed(case, steps=3)
        say(f"{case}: {found.neighbours} neighbours, worst {found.worst:.7f}")
        total += found
    for recipe in PRIVATE:
        total += through_the_trainer(recipe)
    return total
