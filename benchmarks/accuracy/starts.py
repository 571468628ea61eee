"""Where tables start that pretrain: one net, trained on public images without labels.

As NoiseCurve does it: SimCLR on 6 000 images of Tiny-ImageNet, the private data has no
part in it. It is trained once, and every arm and seed of a table starts from it, so
that a seed varies sampling and noise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from images import normalised

from curvedp import models
from curvedp.noise import RandomStreams
from curvedp.probes import PublicProbe
from curvedp.recipes import Pretraining
from curvedp.train.pretrain import pretrain

HERE = Path(__file__).with_name("results")
SEED, CLASSES = 0, 10
SIMCLR = Pretraining(
    pretrain_epochs=100,
    pretrain_batch_size=256,
    pretrain_learning_rate=0.1,
    pretrain_labels="simclr",
)
#: Net and settings of every start.
STARTS = {"simclr": ("small-cnn", "cifar10", SIMCLR)}


def make(name: str, source: Path) -> None:
    """Pretrain, and write the parameters down."""
    sys.path.insert(0, str(source))
    import load_data

    net, data, how = STARTS[name]
    images, _ = load_data.tinyimagenet()
    x = normalised(torch.from_numpy(images), data)
    torch.manual_seed(SEED)
    model = models.build(net, tuple(x.shape[1:]), CLASSES)
    public = PublicProbe(x, name="Tiny-ImageNet")
    pretrain(model, torch.nn.CrossEntropyLoss(), public, how, RandomStreams(SEED))
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    facts = {**how.facts(), "images": len(x), "torch": torch.__version__}
    np.savez(_path(name), facts=json.dumps(facts), **values)


def load(name: str, model: torch.nn.Module) -> None:
    """Give a net of the start's kind its parameters."""
    with np.load(_path(name)) as stored, torch.no_grad():
        for own, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(stored[own]))


def _path(name: str) -> Path:
    return HERE / f"start_{name}.npz"
