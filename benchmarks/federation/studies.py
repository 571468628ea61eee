"""What is compared: methods, accounts and settings of the two studies."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

from curvedp.barrier import Relation
from curvedp.federated import FederatedPlan, Federation, View

CLIENTS, DELTA = 20, 1e-5
ROUNDS = {"cifar": 70, "fashion": 100}
#: Part of its records that a client draws for a round, in secret.
RECORD_RATE = {"cifar": 1.0, "fashion": 0.1}
NOISE_FILE = Path(__file__).parents[1] / "results" / "federated_noise.json"
#: Epsilons of the study; infinity is the row without noise.
EPSILONS = {"cifar": (0.5, 1.0, 2.0, 5.0, 10.0, math.inf), "fashion": (2.0,)}
#: View and relation of an account.
ACCOUNTS = {
    "paper": (View.of("each-client"), Relation.REPLACE_ONE),
    "tight": (View.of("trusted-aggregate"), Relation.ADD_REMOVE),
}
#: Smallest part of a Dirichlet split: a record of a tiny client would need much noise.
LEAST = 500
#: lr / rho, lr / (1 - momentum): by how much a constant gradient moves in a round.
STEPS = tuple(0.05 * 2**k for k in range(11))
ADAM_RATES = tuple(0.001 * 2**k for k in range(11))
#: A run of the net takes minutes where one of the linear head takes seconds.
FEWER_STEPS = tuple(0.8 * 2**k for k in range(8))
RHO, MOMENTUM = 0.5, 0.9


def _plain(step):
    return {"learning_rate": step}


def _momentum(step):
    return {"learning_rate": step * (1 - MOMENTUM), "momentum": MOMENTUM}


def _sofim(step):
    return {"learning_rate": step * RHO, "rho": RHO, "beta": MOMENTUM}


#: The inverse of a covariance makes steps of another length.
NEWTON_STEPS = tuple(0.0125 * 2**k for k in range(11))
_RIDGES = tuple({"damping": d, "clip_norm": 10.0} for d in (0.05, 0.5))
#: Beside rho 0.5 and beta 0.9, the paper's, of the other arms.
_OTHER_SOFIM = tuple(
    {"rho": rho, "beta": beta, "clip_norm": 10.0}
    for rho, beta in ((0.05, 0.9), (5.0, 0.9), (50.0, 0.9), (0.5, 0.5), (5.0, 0.5))
)
#: recipe, mode, settings of a step, steps, and further settings that are tuned.
_CLIPS = ({"clip_norm": 10.0}, {"clip_norm": 2.0})
_FLAT_OR_NOT = (
    {"clipping": "flat", "clip_norm": 1.0},
    {"clipping": "normalised", "clip_norm": 1.0},
)
ARMS = {
    "cifar": {
        "fedgd": ("dp-fedgd", None, _plain, STEPS, _CLIPS),
        "momentum": ("dp-fedgd+momentum", None, _momentum, STEPS, _CLIPS),
        "sofim (paper)": ("dp-fedsofim", None, _sofim, STEPS, _CLIPS),
        "sofim (code)": ("dp-fedsofim", "code", _sofim, STEPS, _CLIPS),
        "fedadam": ("dp-fedadam", None, _plain, ADAM_RATES, _CLIPS),
        "fedyogi": ("dp-fedyogi", None, _plain, ADAM_RATES, _CLIPS),
        "sofim (rho, beta)": ("dp-fedsofim", None, _sofim, STEPS, _OTHER_SOFIM),
        "sofim (adaptive)": ("dp-fedsofim", "adaptive", _sofim, STEPS, _CLIPS),
        "fedadambc": ("dp-fedadambc", None, _plain, ADAM_RATES, _CLIPS),
        "fednew (synthetic)": ("dp-fednew", None, _plain, NEWTON_STEPS, _RIDGES),
        "fednew (public)": (
            "dp-fednew",
            None,
            _plain,
            NEWTON_STEPS,
            tuple({**own, "probe": "public"} for own in _RIDGES),
        ),
    },
    "fashion": {
        "fedgd": ("dp-fedgd", None, _plain, FEWER_STEPS, _FLAT_OR_NOT),
        "momentum": ("dp-fedgd+momentum", None, _momentum, FEWER_STEPS, _FLAT_OR_NOT),
        "fedkfc": (
            "dp-fedkfc",
            None,
            _momentum,
            FEWER_STEPS,
            ({"damping": 0.05}, {"damping": 0.2}),
        ),
    },
}


def groups(study):
    """What a choice of settings is made for: (arm, account, epsilon, split)."""
    accounts = ("paper", "tight") if study == "cifar" else ("tight",)
    splits = ("iid",) if study == "cifar" else ("iid", "dirichlet, own sizes")
    for arm in ARMS[study]:
        for split in splits:
            for epsilon in EPSILONS[study]:
                # without noise there is nothing to account for
                for account in accounts if math.isfinite(epsilon) else ("none",):
                    yield {
                        "study": study, "arm": arm, "account": account,
                        "epsilon": epsilon, "split": split,
                    }  # fmt: skip


def trials(group):
    """Settings that are tried for a group: as many for every arm that has no more."""
    _, _, of_step, steps, further = ARMS[group["study"]][group["arm"]]
    for more in further:
        for step in steps:
            settings = {**of_step(step), **more}
            if "rho" in more:
                settings["learning_rate"] = step * more["rho"]
            yield {"step": step, "settings": settings}


def federation(study, sizes, relation, rounds=None):
    """Clients that declare these sizes, in a run of the study."""
    return Federation(
        tuple(sizes), rounds or ROUNDS[study], relation=relation,
        record_rate=RECORD_RATE[study],
    )  # fmt: skip


def write_noise(path):
    """Noise over what a record moves, in one round, that each epsilon takes."""
    found = {}
    for study, epsilons in EPSILONS.items():
        for relation in ("add-remove", "replace-one"):
            for epsilon in filter(math.isfinite, epsilons):
                one = federation(study, (1000.0,), Relation(relation))
                plan = FederatedPlan.make(
                    one, "trusted-aggregate", bound=1.0, delta=DELTA, epsilon=epsilon
                )  # fmt: skip
                found[f"{study} {relation} {epsilon:g}"] = plan.noise_multiplier
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


@cache
def _noise_table():
    return json.loads(NOISE_FILE.read_text())


def noise_for(group, sizes):
    """The multiplier of a group, for clients that declare these sizes."""
    if not math.isfinite(group["epsilon"]):
        return 1e-9
    view, relation = ACCOUNTS[group["account"]]
    name = f"{group['study']} {relation.value} {group['epsilon']:g}"
    own = federation(group["study"], sizes, relation)
    return _noise_table()[name] / own.seen_noise(view, 1.0)
