"""Records of the studies: plain copies, and reading them.

A file holds ``x`` and ``y``: features of CIFAR-10, images of FashionMNIST.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

HELD_OUT = 5000


def prepare(source, folder):
    """Plain copies: features of CIFAR-10 and of public images, and FashionMNIST."""
    sys.path.insert(0, str(source))
    import load_data

    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in zip(("train", "test"), load_data.fashion_mnist(), strict=True):
        images = np.asarray(x, dtype=np.uint8).reshape(-1, 1, 28, 28)
        np.savez_compressed(folder / f"fashion_{part}.npz", x=images, y=y)
    weights = {
        name: torch.from_numpy(np.asarray(value, dtype=np.float32))
        for name, value in load_data.weights("cifar100_resnet20").items()
    }
    mean = torch.tensor((0.5070, 0.4865, 0.4409)).reshape(1, 3, 1, 1)
    std = torch.tensor((0.2673, 0.2564, 0.2761)).reshape(1, 3, 1, 1)
    pairs = {**dict(zip(("train", "test"), load_data.cifar10(), strict=True)),
             "public": load_data.tinyimagenet()}  # fmt: skip
    for part, (x, y) in pairs.items():
        features = []
        with torch.no_grad():
            for start in range(0, len(x), 500):
                images = torch.from_numpy(np.asarray(x[start : start + 500])).float()
                features.append(
                    resnet_20_features(weights, (images / 255 - mean) / std)
                )
        found = torch.cat(features).numpy()
        np.savez_compressed(folder / f"cifar_{part}.npz", x=found, y=y)


def resnet_20_features(weights, x):
    """The 64 features before the last layer, batch norm as it was trained."""

    def norm(x, name):
        own = {
            k: weights[f"{name}.{k}"]
            for k in ("running_mean", "running_var", "weight", "bias")
        }
        return torch.nn.functional.batch_norm(x, **own, training=False)

    def conv(x, name, stride=1, padding=1):
        kernel = weights[f"{name}.weight"]
        return torch.nn.functional.conv2d(x, kernel, stride=stride, padding=padding)

    x = norm(conv(x, "conv1"), "bn1").relu()
    for layer in (1, 2, 3):
        for block in (0, 1, 2):
            name = f"layer{layer}.{block}"
            stride = 2 if layer > 1 and block == 0 else 1
            kept = x
            if stride == 2:
                down = f"{name}.downsample"
                kept = norm(conv(x, f"{down}.0", 2, padding=0), f"{down}.1")
            inner = norm(conv(x, f"{name}.conv1", stride), f"{name}.bn1").relu()
            x = (norm(conv(inner, f"{name}.conv2"), f"{name}.bn2") + kept).relu()
    return x.mean((2, 3))


@cache
def load(folder, study, part, device):
    with np.load(Path(folder) / f"{study}_{part}.npz") as arrays:
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]).long()
    if x.dtype == torch.uint8:
        x = (x.float() / 255 - 0.2860) / 0.3530  # public constants
    return x.to(device), y.to(device)


def records_for(folder, study, device, final):
    """Training and scored records; tuning never opens the test files."""
    x, y = load(folder, study, "train", device)
    if final:
        return (x, y), load(folder, study, "test", device)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    held = min(HELD_OUT, len(x) // 5)
    scored, kept = order[:held].to(device), order[held:].to(device)
    return (x[kept], y[kept]), (x[scored], y[scored])
