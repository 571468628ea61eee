"""One run: a federation of the study, trained and scored."""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from records import load, records_for
from studies import (
    ARMS,
    CLIENTS,
    DELTA,
    LEAST,
    RECORD_RATE,
    ROUNDS,
    federation,
    noise_for,
)
from torch.utils.data import TensorDataset

from curvedp.barrier import Relation
from curvedp.data import ArrayDataset
from curvedp.federated import Client, FederatedPlan, Server, Shared
from curvedp.federated.partition import dirichlet_partition, iid_partition
from curvedp.federated.rounds import asking, run_rounds
from curvedp.layers import Batch
from curvedp.models import build
from curvedp.probes import PublicProbe
from curvedp.recipes import get_federated_recipe

#: Rows of a pass: the linear head takes all at once.
ROWS = {"cifar": 65536, "fashion": 512}


def run(spec, folder, device, *, final, apart=False, rounds=None, rows=None):
    """One training, scored every tenth round; a JSON value."""
    study = spec["study"]
    (x, y), (scored_x, scored_y) = records_for(folder, study, device, final)
    own_sizes = "own sizes" in spec["split"]
    if own_sizes:
        labels, least = y.cpu().numpy(), min(LEAST, len(y) // (2 * CLIENTS))
        parts = dirichlet_partition(labels, CLIENTS, 0.3, spec["seed"], least)
    else:
        parts = iid_partition(len(y), CLIENTS, spec["seed"])
    average = len(y) / CLIENTS
    sizes = [float(len(p)) if own_sizes else average for p in parts]
    noise = noise_for(spec, sizes)
    if not (own_sizes or apart):
        # one client with all records: the mean's noise is C s / (n size) either way
        parts, sizes = [np.arange(len(y))], [float(len(y))]
    rounds = rounds or ROUNDS[study]
    rows = rows or ROWS[study]
    recipe = _recipe(spec)
    relation = Relation.ZERO_OUT if own_sizes else Relation.ADD_REMOVE
    plan = FederatedPlan.make(
        federation(study, sizes, relation, rounds),
        "each-client",  # every share is as planned; whose view it is changes no number
        bound=recipe.clip_norm,
        delta=min(DELTA, 0.1 / len(y)),
        noise_multiplier=noise,
    )
    public = None
    if recipe.curvature is not None and recipe.curvature.probe == "public":
        others = load(folder, study, "public", "cpu")
        public = PublicProbe(TensorDataset(*others), name="Tiny-ImageNet")
    server_side, client_side = (
        _shared(study, recipe, plan, x, device, spec["seed"], public) for _ in range(2)
    )
    clients = {
        number: Client(
            number, client_side,
            ArrayDataset(x[_on(part, device)], y[_on(part, device)]),
            physical_batch_size=min(rows, _most_drawn(len(part), RECORD_RATE[study])),
            unsafe_reproducible_noise=1000 + spec["seed"],
        )
        for number, part in enumerate(parts)
    }  # fmt: skip
    server = Server(server_side, exact_frames=False)
    curve = {}

    def score(report):
        made = report.round + 1
        if made % 10 == 0 or made == rounds:
            curve[made] = _accuracy(server_side.model, scored_x, scored_y)

    started = time.perf_counter()
    run_rounds(server, asking(clients), on_round=score)
    hits = _hits(server_side.model, scored_x, scored_y)
    by_class = [
        float(hits[scored_y == c].float().mean()) for c in range(int(y.max()) + 1)
    ]
    return {
        **spec, "noise multiplier": noise, "clients run": len(parts),
        "curve": curve, "accuracy": curve[rounds], "by class": by_class,
        "rounds": rounds, "final": final, "seconds": time.perf_counter() - started,
        "device": device,
    }  # fmt: skip


def _most_drawn(size, rate):
    """Rows for nearly every draw of so many records."""
    mean = rate * size
    return min(size, 8 * math.ceil((mean + 4 * math.sqrt(mean)) / 8))


def _on(part, device):
    return torch.from_numpy(part).to(device)


def _recipe(spec):
    name, mode, *_ = ARMS[spec["study"]][spec["arm"]]
    return get_federated_recipe(name).configure(mode=mode, **spec["settings"])


def _shared(study, recipe, plan, x, device, seed, public=None):
    torch.manual_seed(seed)
    if study == "cifar":
        model = torch.nn.Linear(x.shape[1], 10)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
    else:
        model = build("cnn", tuple(x.shape[1:]), 10, width=8)
    target = torch.zeros(1, dtype=torch.long, device=device)
    template = Batch(torch.zeros_like(x[:1]), target)
    return Shared(
        model.to(device), "cross-entropy", recipe, plan, template, probe_seed=seed,
        probes=public,
    )  # fmt: skip


@torch.no_grad()
def _hits(model, x, y):
    return torch.cat(
        [model(part).argmax(1) == own for part, own in zip(
            x.split(2000), y.split(2000), strict=True
        )]
    )  # fmt: skip


def _accuracy(model, x, y):
    return float(_hits(model, x, y).float().mean())
