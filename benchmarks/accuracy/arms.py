"""The arms of the accuracy tables: what is fixed, what is searched, and where.

A range is searched uniformly (``"linear"``) or uniformly in the logarithm (``"log"``);
a list is a choice. Trials are drawn from a generator seeded by table and arm, before
anything is trained.

What is here is part of the key of every stored result: an edit of a table that has
results makes them results of something else.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import correlated
import rivals

#: Batch and epochs of the tables with DP-NGD.
NGD_BATCH, NGD_EPOCHS = 1024, 10


@dataclass(frozen=True)
class Arm:
    """A recipe with what is fixed and what is searched of its settings."""

    recipe: str
    fixed: dict
    searched: dict
    trials: int
    #: One trial in each of so many equal parts of every range: less luck in the draw.
    spread: bool = False
    #: Searched as well, with as many trials, where the best of those was at an edge.
    again: dict | None = None
    #: What an earlier search chose, as one more trial: the first.
    first: dict | None = None
    #: All combinations of the lists that are searched; their number is that of trials.
    grid: bool = False


@dataclass(frozen=True)
class Table:
    """Data, net, privacy and sampling of a table, and its arms.

    Attributes:
        page: where it is shown.
        options: of the net.
        start: pretrained parameters that all runs start from; see ``starts``.
        tuned_in: another table whose chosen settings are tested here; None tunes them.
        untuned: rows that take the chosen settings of an arm, but for a few:
            name -> (arm, settings).
        seeds: paired seeds of the test.
        paper: what a paper reports for a row, in per cent.
        note: what a reader of this table has to know.
        finalists: trials of an arm, the best ones, that get more seeds before one is
            chosen; with none, one seed chooses.
    """

    page: str
    data: str
    model: str
    batch_size: int
    epochs: int
    arms: dict[str, Arm]
    epsilon: float = 1.0
    delta: float = 1e-5
    options: dict = field(default_factory=dict)
    start: str | None = None
    tuned_in: str | None = None
    untuned: dict[str, tuple[str, dict]] = field(default_factory=dict)
    seeds: int = 5
    finalists: int = 3
    paper: dict[str, str] = field(default_factory=dict)
    note: str = ""


PLAIN = {
    "learning_rate": ("log", 0.02, 4.0),
    "momentum": [0.0, 0.9],
    "clipping": ["flat", "normalised"],
    "clip_norm": [0.1, 0.3, 1.0, 3.0],
}
WHITENED = {
    "learning_rate": ("log", 0.01, 1.0),
    "momentum": [0.9],
    "clipping": ["normalised"],
    "damping": ("log", 0.005, 0.5),
    "exponent": [0.25, 0.5],
    "back_map": ["none", "natural"],
    "spectral_power": [2.0, 3.0, 4.0],
}

# -- table 1: the protocol of DP-KFC; the two arms of the claim get more trials --------

PAPER = {
    "dp-sgd": Arm("dp-sgd", {}, PLAIN, 16),
    "dp-adam": Arm(
        "dp-adam",
        {},
        {
            "learning_rate": ("log", 1e-4, 2e-2),
            "clipping": ["flat", "normalised"],
            "clip_norm": [0.1, 0.3, 1.0, 3.0],
        },
        12,
    ),
    "dp-kfc": Arm("dp-kfc", {"side": "a"}, WHITENED, 16),
    "dp-kfc both sides": Arm("dp-kfc", {"side": "both"}, WHITENED, 12),
    "dp-kfc paper": Arm(
        "dp-kfc",
        {"mode": "paper"},
        {"learning_rate": ("log", 1e-4, 2e-2), "damping": ("log", 1e-3, 1.0)},
        12,
    ),
}

# -- table 2: what makes plain DP-SGD strong: large batches, tanh, normalised clipping -

NORMALISED = {"clipping": "normalised", "clip_norm": 1.0}
STEPS = {"learning_rate": ("log", 0.02, 8.0), "momentum": [0.0, 0.9]}
#: Twice the rates of ``WHITENED``: a large batch has less noise.
MORE_WHITENED = {
    **{k: v for k, v in WHITENED.items() if k != "clipping"},
    "learning_rate": ("log", 0.02, 2.0),
    "rank": [32, 0],
}
STRONG = {
    "dp-sgd": Arm("dp-sgd", NORMALISED, STEPS, 12),
    "dp-adam": Arm(
        "dp-adam", NORMALISED, {"learning_rate": ("log", 1e-4, 2e-2)}, 12
    ),
    "dp-kfc": Arm("dp-kfc", {"side": "a", **NORMALISED}, MORE_WHITENED, 12),
    "dp-kfc both sides": Arm(
        "dp-kfc", {"side": "both", **NORMALISED}, MORE_WHITENED, 12
    ),
}  # fmt: skip

# -- table 4: DP-NGD with public images beside what else they could be used for --------

#: All of the public images at every refresh.
PUBLIC_IMAGES = 500
PROBES = {"probe_size": PUBLIC_IMAGES, "probe_batches": 1, "refresh": 32}
PUBLIC = {"probe": "public", "labels": "model", **PROBES}
SYNTHETIC = {"probe": "synthetic", "labels": "model", **PROBES}
NATURAL = {
    "learning_rate": ("log", 0.003, 0.3),
    "momentum": [0.0, 0.9],
    "clip_norm": [1.0, 3.0, 10.0],
    "clamp": ["matched", "printed"],
    "plain_step": [0.5, 1.0, 2.0],
    "floor_base": [0.01, 0.1, 1.0],
    "clipping": ["flat", "normalised"],
}
DIAGONAL = {
    k: v
    for k, v in MORE_WHITENED.items()
    if k not in ("rank", "spectral_power")  # it has no eigenpairs, the images no power
}


def _but_rate(searched: dict) -> dict:
    return {k: v for k, v in searched.items() if k != "learning_rate"}


#: The first eight trials of these arms have steps that are mostly too short.
LONGER = {"effective_step": ("log", 1.0, 20.0), "momentum": [0.0, 0.9]}
NGD = {
    "dp-sgd": Arm(
        "dp-sgd", NORMALISED, STEPS, 8, again={**LONGER, **rivals.CLIPS}
    ),
    "diagonal public": Arm(
        "dp-kfc", {"diagonal": True, **PUBLIC, **NORMALISED}, DIAGONAL, 8,
        again={**_but_rate(DIAGONAL), **LONGER, "damping": ("log", 0.001, 0.1)},
    ),
    "dp-kfc": Arm(
        "dp-kfc", {"side": "a", **SYNTHETIC, **NORMALISED}, MORE_WHITENED, 8,
        again={**_but_rate(MORE_WHITENED), **LONGER},
    ),
    "dp-ngd public": Arm("dp-ngd", PUBLIC, NATURAL, 8),
    "dp-ngd synthetic": Arm(
        "dp-ngd", SYNTHETIC, {**NATURAL, "spectral_power": [2.0, 3.0, 4.0]}, 8
    ),
}  # fmt: skip
NGD_UNTUNED = {
    "dp-ngd public, refresh 8": ("dp-ngd public", {"refresh": 8}),
    "dp-ngd public, no clamp": ("dp-ngd public", {"clamp": "none"}),
}


#: Of what was measured before the floor moved at every step.
STAIRCASE = """\
The floor under `dp-ngd`'s eigenvalues moved at refreshes alone in these runs, as a
staircase, and not at every step as equation 18 of the paper says and as it does now.
"""
#: What the searches before that chose on FashionMNIST, beside three trials of each arm.
CHOSEN_BEFORE = {
    "dp-sgd": {
        "clipping": "flat", "clip_norm": 1.0, "momentum": 0.0, "learning_rate": 6.73,
    },
    "diagonal public": {
        "momentum": 0.9, "damping": 0.0359, "exponent": 0.25, "back_map": "natural",
        "learning_rate": 0.436,
    },
    "dp-kfc": {
        "momentum": 0.0, "damping": 0.0688, "exponent": 0.25, "back_map": "natural",
        "spectral_power": 2.0, "rank": 32, "learning_rate": 2.64,
    },
    "dp-ngd public": {
        "learning_rate": 0.0975, "momentum": 0.0, "clip_norm": 3.0, "clamp": "matched",
        "plain_step": 0.5, "floor_base": 0.01, "clipping": "flat",
    },
    "dp-ngd synthetic": {
        "learning_rate": 0.08, "momentum": 0.0, "clip_norm": 3.0, "clamp": "matched",
        "plain_step": 2.0, "floor_base": 1.0, "clipping": "flat", "spectral_power": 2.0,
    },
}  # fmt: skip
MOVING = {
    name: Arm(
        own.recipe, own.fixed, own.again or own.searched, 3, spread=True,
        first=CHOSEN_BEFORE[name],
    )
    for name, own in NGD.items()
}  # fmt: skip
MOVING_TABLE = Table(
    "dp_ngd", "fashion_mnist", "small-cnn", NGD_BATCH, NGD_EPOCHS, MOVING,
    untuned=NGD_UNTUNED, seeds=3, finalists=0,
    note="The floor moves at every step. Of an arm's four trials the first is what "
    "the search of the next\ntable chose; three are drawn anew.\n",
)  # fmt: skip


def ngd_table(data: str, epsilon: float) -> Table:
    first = f"{data} dp-ngd epsilon 1"
    return Table(
        "dp_ngd", data, "small-cnn", NGD_BATCH, NGD_EPOCHS, NGD, epsilon=epsilon,
        tuned_in=None if epsilon == 1.0 else first,
        untuned=NGD_UNTUNED if epsilon == 1.0 else {}, seeds=3, finalists=0,
        note=STAIRCASE,
    )  # fmt: skip


# -- DP-NGD's tables 3 and 4: curvature from private data, and the order of clipping ---

PRIVATE = {"probe": "private", "refresh": 32}
BOUNDS = {
    "decay": [0.0, 0.8],
    "input_bound": [0.3, 1.0, 3.0],
    "output_bound": [0.1, 0.3, 1.0],
}
#: Learning rates: the map stretches the noise twice, or not at all.
CLIP_ORDERS = {"before": ("log", 3e-4, 0.3), "after": ("log", 0.01, 3.0)}
NGD_CHOICES = {
    "dp-sgd": Arm("dp-sgd", {}, {**LONGER, **rivals.CLIPS}, 8, spread=True),
    "dp-ngd public": Arm("dp-ngd", PUBLIC, NATURAL, 8, spread=True),
    **{
        f"dp-ngd private, share {share:g}": Arm(
            "dp-ngd", {**PRIVATE, "curvature_share": share}, {**NATURAL, **BOUNDS}, 8,
            spread=True,
        )
        for share in (0.2, 0.5)
    },
    **{
        f"dp-ngd public, clip {order}": Arm(
            "dp-ngd", {**PUBLIC, "clip_order": order},
            {**NATURAL, "learning_rate": rates}, 8, spread=True,
        )
        for order, rates in CLIP_ORDERS.items()
    },
}  # fmt: skip
NGD_PAPER = {
    "dp-ngd public": "67.78",
    "dp-ngd private, share 0.2": "56.12",
    "dp-ngd private, share 0.5": "54.35",
    "dp-ngd public, clip before": "61.25",
    "dp-ngd public, clip after": "64.54",
}

# -- table 5: DP-KFC's tables 1 and 6, tuned at epsilon 1 and 8 -----------------------

RIVALS = {
    name: Arm(own.recipe, own.fixed, own.searched, own.trials, True, own.again)
    for name, own in rivals.ARMS.items()
}
RIVALS_TUNED_IN = {1.0: None, 2.0: 1.0, 5.0: 8.0, 8.0: None}


def rivals_table(epsilon: float) -> Table:
    tuned = RIVALS_TUNED_IN[epsilon]
    return Table(
        "rivals", "mnist", "dpkfc-mnist", 256, 5, RIVALS, epsilon=epsilon,
        tuned_in=None if tuned is None else f"mnist rivals epsilon {tuned:g}",
        paper=rivals.PAPER[epsilon], finalists=2,
    )  # fmt: skip


# -- table 6: NoiseCurve's table 1b ---------------------------------------------------


def correlated_table(epsilon: float, start: str | None) -> Table:
    """Of correlated noise; the paper's figures are of a pretrained net."""
    arms = {
        name: Arm(
            own.recipe, own.fixed, own.searched,
            math.prod(len(values) for values in own.searched.values()), grid=True,
        )
        for name, own in correlated.arms(epsilon, start).items()
    }  # fmt: skip
    return Table(
        "correlated", "cifar10", "small-cnn", NGD_BATCH, NGD_EPOCHS, arms,
        epsilon=epsilon, start=start, finalists=0,
        paper=correlated.PAPER[epsilon] if start else {},
    )  # fmt: skip


TABLES: dict[str, Table] = {
    **{
        f"{data} paper protocol": Table("accuracy", data, "dpkfc-mnist", 256, 5, PAPER)
        for data in ("mnist", "fashion_mnist")
    },
    **{
        f"{data} strong baseline": Table(
            "strong_baseline", data, "dpkfc-mnist", 2048, 30, STRONG,
            options={"activation": "tanh"},
        )
        for data in ("mnist", "fashion_mnist")
    },
    "fashion_mnist dp-ngd, floor of every step, epsilon 1": MOVING_TABLE,
    **{
        f"{data} dp-ngd epsilon {epsilon:g}": ngd_table(data, epsilon)
        for data in ("fashion_mnist", "cifar10")
        for epsilon in (1.0, 2.0)
    },
    "cifar10 choices of dp-ngd": Table(
        "dp_ngd_choices", "cifar10", "small-cnn", NGD_BATCH, NGD_EPOCHS, NGD_CHOICES,
        epsilon=2.0, seeds=3, finalists=0, paper=NGD_PAPER, note=STAIRCASE,
    ),
    **{
        f"mnist rivals epsilon {epsilon:g}": rivals_table(epsilon)
        for epsilon in RIVALS_TUNED_IN
    },
    **{
        f"cifar10 correlated{pretrained} epsilon {epsilon:g}": correlated_table(
            epsilon, start
        )
        for pretrained, start in (("", None), (" pretrained", "simclr"))
        for epsilon in correlated.EPSILONS
    },
}  # fmt: skip


def trials(table: str, arm: str) -> list[dict[str, object]]:
    """The settings of every trial of an arm."""
    about = TABLES[table].arms[arm]
    if about.grid:
        fixed = {"recipe": about.recipe, **about.fixed}
        grid = itertools.product(*about.searched.values())
        own = (dict(zip(about.searched, values, strict=True)) for values in grid)
        return [_settings({**fixed, **drawn}) for drawn in own]
    draw = random.Random(f"{table}/{arm}")
    found = _trials(about, about.searched, draw, about.spread)
    if about.again is not None:
        draw = random.Random(f"{table}/{arm}")
        found += _trials(about, about.again, draw, True)
    return found


def _trials(about, searched, draw, spread) -> list[dict[str, object]]:
    places = _places(searched, about.trials, draw) if spread else {}
    found = []
    if about.first is not None:
        found.append(_settings({"recipe": about.recipe, **about.fixed, **about.first}))
    for number in range(about.trials):
        own = {
            name: _drawn(where, draw, places[name][number] if name in places else None)
            for name, where in searched.items()
        }
        found.append(_settings({"recipe": about.recipe, **about.fixed, **own}))
    return found


def _settings(drawn: dict) -> dict[str, object]:
    """What is drawn in units of the clip norm C, as a recipe takes it.

    - ``relative_floor``, AdamBC's: in units of C^2, as its moments are;
    - ``effective_step``: how far the parameters move, in the long run, for a mean
      gradient that has been C long in one direction. Learning rates of arms that differ
      in C, momentum or floor are in the same range of it.
    """
    own = dict(drawn)
    if "relative_floor" in own:
        own["floor"] = own.pop("relative_floor") * own["clip_norm"] ** 2
    if "effective_step" in own:
        step = own.pop("effective_step")
        own["learning_rate"] = float(f"{step / effective_step(own, 1.0):.4g}")
    return own


def usable(settings: dict) -> dict[str, object]:
    """A job's settings as a recipe takes them.

    A recipe refuses what has no effect beside the rest. In the keys of stored results
    it stays.
    """
    idle = ("plain_step", "floor_base") if settings.get("clamp") == "none" else ()
    return {name: value for name, value in settings.items() if name not in idle}


def effective_step(settings: dict, learning_rate: float) -> float:
    """Of a learning rate: see :func:`_settings`."""
    length = settings["clip_norm"] / (1 - settings.get("momentum", 0.0))
    if "floor" in settings:  # at the floor, where signals are far below the noise
        length /= settings["floor"] ** 0.5
    return learning_rate * length


def inside(table: str, arm: str, settings: dict[str, object]) -> dict[str, bool]:
    """For every searched range, whether the value is off its outer twentieth.

    Of two searches, that in which fewer values are at an edge.
    """
    about = TABLES[table].arms[arm]
    searches = [about.searched] + ([about.again] if about.again else [])
    found = [_inside(searched, settings) for searched in searches]
    return max(found, key=lambda own: sum(own.values()) - len(own))


def _inside(searched: dict, settings: dict[str, object]) -> dict[str, bool]:
    found = {}
    for name, where in searched.items():
        if isinstance(where, tuple):
            low, high = where[1:]
            value = _value(name, settings)
            found[name] = (
                (high / low) ** 0.05 * low < value < high / (high / low) ** 0.05
            )
        elif name in ("learning_rate", "effective_step"):  # of a grid
            value = _value(name, settings)
            found[name] = min(where) * 1.01 < value < max(where) / 1.01
    return found


def _value(name: str, settings: dict) -> float:
    if name == "effective_step":
        return effective_step(settings, settings["learning_rate"])
    return float(settings[name])


def _places(searched: dict, trials: int, draw: random.Random) -> dict[str, list[float]]:
    """Where in a range each trial is, from 0 to 1: a Latin hypercube."""
    found = {}
    for name, where in searched.items():
        if isinstance(where, tuple):
            parts = [(k + draw.random()) / trials for k in range(trials)]
            draw.shuffle(parts)
            found[name] = parts
    return found


def _drawn(where, draw, place=None):
    if isinstance(where, list):
        return draw.choice(where)
    kind, low, high = where
    share = draw.random() if place is None else place
    if kind == "log":
        return float(f"{low * (high / low) ** share:.3g}")
    return float(f"{low + (high - low) * share:.3g}")
