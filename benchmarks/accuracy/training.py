"""One job of the tables: train with its settings, count what is right."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import starts
import torch
from arms import TABLES, usable
from images import HELD_OUT, SIZES, load, public, split
from torch.utils.data import TensorDataset

from curvedp import make_private, models
from curvedp.probes import PublicProbe
from curvedp.recipes import get_recipe
from curvedp.update import Chain, ExponentialAverage

SIGMAS = Path(__file__).with_name("sigmas.json")
#: Fewer only to see whether everything runs.
MOST_STEPS = int(os.environ.get("MOST_STEPS", "1000000"))


def train(job, folder, device):
    """Accuracy on the validation split, or of a test on the test file."""
    table = TABLES[job["table"]]
    if job["phase"] == "test":
        x, y = load(folder, table.data, "train", device)
        held_out = load(folder, table.data, "test", device)
    else:
        (x, y), held_out = split(folder, table.data, device)
    bands = job["settings"].get("bands", 1)
    sigma, rate, steps = noise(table, len(x), bands)
    model, private = attach(job, table, folder, (x, y), sigma, rate, steps)
    found = {"sigma": private.plan.noise_multiplier, "steps": steps}
    started = time.monotonic()
    try:
        fit(private)
    except torch.linalg.LinAlgError as error:
        # diverged: no curvature of a net that is not finite; scored as it stands
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - started
    take_average(model, private)
    return {"accuracy": share_right(model, *held_out), **found}


def attach(job, table, folder, examples, sigma, rate, steps):
    """Model and private loop of a job."""
    x, y = examples
    settings = usable(job["settings"])
    average = settings.pop("average", None)
    recipe = get_recipe(settings.pop("recipe")).configure(**settings)
    if average is not None:
        recipe = averaged(recipe, average)
    probes = None
    if "public" in (settings.get("probe"), settings.get("spectrum_probe")):
        probes = PublicProbe(public(folder, table.data), name="Tiny-ImageNet")
    torch.manual_seed(job["seed"])
    shape = tuple(x.shape[1:])
    model = models.build(table.model, shape, 10, **table.options).to(x.device)
    if table.start is not None:
        starts.load(table.start, model)
    private = make_private(
        model,
        recipe.make_optimiser(model.parameters()),
        TensorDataset(x, y),
        recipe=recipe,
        loss="cross-entropy",
        noise_multiplier=sigma,
        sample_rate=rate,
        steps=steps,
        expected_batch_size=table.batch_size,
        delta=table.delta,
        relation="zero-out",
        probes=probes,
        physical_batch_size=room(table.batch_size),
        seed=job["seed"],
        # paired seeds of an experiment on public benchmark data
        unsafe_reproducible_noise=job["seed"],
        journal=False,
        cuda_graph=x.is_cuda,
    )
    return model, private


def averaged(recipe, decay):
    """The same recipe, whose result is an average of its iterates."""
    transforms = (*recipe.chain.transforms, ExponentialAverage(decay))
    return replace(recipe, chain=Chain(transforms))


def room(batch_size):
    """Rows for most draws at once; it has no influence on what is sampled."""
    return 8 * math.ceil((batch_size + 2 * math.sqrt(batch_size)) / 8)


def fit(private):
    """All steps."""
    private.model.train()
    for batch in private.loader:
        if private.step >= MOST_STEPS:
            break
        private.train_on(batch)


def take_average(model, private):
    """Put the average of the iterates into the model, where one is kept."""
    average = private.averaged_parameters()
    if average is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(average[name])


def share_right(model, x, y):
    model.eval()
    with torch.no_grad():
        right = [
            (model(a).argmax(1) == b).sum()
            for a, b in zip(x.split(1000), y.split(1000), strict=True)
        ]
    return float(torch.stack(right).sum()) / len(y)


# -- noise -----------------------------------------------------------------------------


def noise(table, size, bands=1):
    rate = table.batch_size / size
    stored = json.loads(SIGMAS.read_text(encoding="utf-8"))
    return stored[sigma_key(table, size, bands)], rate, steps_of(table, size)


def steps_of(table, size):
    return table.epochs * (size // table.batch_size)


def sigma_key(table, size, bands=1):
    steps = steps_of(table, size)
    of_bands = "" if bands == 1 else f"/{bands} bands"
    return f"{table.epsilon}/{table.delta}/{table.batch_size}/{size}/{steps}{of_bands}"


def bands_of(table):
    """All numbers of bands that an arm of the table may have."""
    found = {1}
    for arm in table.arms.values():
        found |= set(arm.searched.get("bands", ()))
    return sorted(found)


def sizes_of(table):
    """Numbers of examples that a table trains on: all, and without those held out."""
    whole = SIZES[table.data]["train"]
    return [whole] if table.tuned_in else [whole, whole - HELD_OUT]


def calibrate():
    """Add the noise multipliers that the tables need and that are not there yet."""
    from curvedp.accounting import calibrate_sigma

    found = json.loads(SIGMAS.read_text(encoding="utf-8"))
    for table in TABLES.values():
        for size, bands in itertools.product(sizes_of(table), bands_of(table)):
            key = sigma_key(table, size, bands)
            if key in found:
                continue
            # groups take turns: each has a part of the examples and of the steps
            found[key] = calibrate_sigma(
                table.epsilon,
                sample_rate=table.batch_size * bands / size,
                steps=math.ceil(steps_of(table, size) / bands),
                delta=table.delta,
                relation="zero-out",
            )
    SIGMAS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
