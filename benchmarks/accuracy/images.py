"""Plain copies of the data sets, and reading them once for every process and device.

A file holds ``x`` (uint8, ``[N, C, H, W]``) and ``y``. Training data that is large lies
in several files, so that each of them is easily copied.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

#: Examples of each part.
SIZES = {
    "mnist": {"train": 60_000, "test": 10_000},
    "fashion_mnist": {"train": 60_000, "test": 10_000},
    "cifar10": {"train": 50_000, "test": 10_000},
}
#: Files that a part is cut into, where it is more than one.
PIECES = {("cifar10", "train"): 3}
#: Public constants: mean and standard deviation of a pixel, by channel.
PIXELS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
HELD_OUT = 5000
PUBLIC_FILE, PUBLIC_IMAGES = "public.npz", 500
#: Weights of red, green and blue in a grey pixel (ITU-R BT.601).
GREY = (0.299, 0.587, 0.114)


# -- writing ---------------------------------------------------------------------------


def prepare(folder, source):
    """Copies of all data sets; what is there already is left alone."""
    sys.path.insert(0, str(source))
    import load_data

    folder.mkdir(parents=True, exist_ok=True)
    for data in SIZES:
        wanted = {part: _files(folder, data, part) for part in ("train", "test")}
        if all(path.exists() for paths in wanted.values() for path in paths):
            continue
        pair = getattr(load_data, data)()
        for part, (x, y) in zip(("train", "test"), pair, strict=True):
            x = np.asarray(x, dtype=np.uint8).reshape(len(x), -1, *x.shape[-2:])
            paths = wanted[part]
            for path, xs, ys in zip(
                paths,
                np.array_split(x, len(paths)),
                np.array_split(y, len(paths)),
                strict=True,
            ):
                np.savez_compressed(path, x=xs, y=ys)
    if not (folder / PUBLIC_FILE).exists():
        images, _ = load_data.tinyimagenet()
        chosen = np.random.default_rng(0).permutation(len(images))[:PUBLIC_IMAGES]
        np.savez_compressed(folder / PUBLIC_FILE, x=images[np.sort(chosen)])


def _files(folder, data, part):
    pieces = PIECES.get((data, part), 1)
    if pieces == 1:
        return [Path(folder) / f"{data}_{part}.npz"]
    return [Path(folder) / f"{data}_{part}_{i + 1}.npz" for i in range(pieces)]


# -- reading ---------------------------------------------------------------------------


@cache
def load(folder, data, part, device):
    """Inputs and labels of "train" or "test", on the device; each is its own files."""
    xs, ys = [], []
    for path in _files(folder, data, part):
        with np.load(path) as arrays:
            xs.append(arrays["x"])
            ys.append(arrays["y"])
    x, y = np.concatenate(xs), np.concatenate(ys)
    if len(x) != SIZES[data][part]:
        raise ValueError(f"{data} {part}: {len(x)} examples, not {SIZES[data][part]}")
    # normalised on the CPU, so that a device has no part in what the inputs are
    inputs = normalised(torch.from_numpy(x), data).to(device)
    return inputs, torch.from_numpy(y).long().to(device)


@cache
def split(folder, data, device):
    """Training and validation, both of the training files."""
    x, y = load(folder, data, "train", device)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    held, kept = order[:HELD_OUT].to(x.device), order[HELD_OUT:].to(x.device)
    return (x[kept], y[kept]), (x[held], y[held])


@cache
def public(folder, data):
    """The public images as the data is: channels, size, normalisation. On the CPU."""
    with np.load(Path(folder) / PUBLIC_FILE) as arrays:
        x = torch.from_numpy(arrays["x"])
    if len(PIXELS[data][0]) == 1:  # grey, and the middle 28 x 28
        weights = torch.tensor(GREY).reshape(1, 3, 1, 1)
        x = (x.float() * weights).sum(1, keepdim=True)[..., 2:-2, 2:-2].contiguous()
    return normalised(x, data)


def normalised(x, data):
    """Pixels as the nets of a data set get them."""
    mean, std = (torch.tensor(c).reshape(-1, 1, 1) for c in PIXELS[data])
    return x.float().div_(255).sub_(mean).div_(std)
