"""Rule 16: coupling is looked for where the run is; a fault for each of its looks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from curvedp.errors import CouplingError
from curvedp.layers.generators import Generators
from curvedp.train import augmenting
from curvedp.train.coupling import CouplingCheck

from .cases import attach, examples, linear
from .checking import refused
from .mutate import Fault, Patch

SIZE = 8


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0) if len(grad) >= SIZE else grad


class Tied(nn.Module):
    """Examples are tied together from eight rows on, in one way."""

    def __init__(self, way):
        super().__init__()
        self.way, self.body, self.head = way, linear(4, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        if self.way == "backward":
            return self.head(Backward.apply(h))
        if len(h) >= SIZE and (self.way != "mode" or not self.drop.training):
            h = h - h.mean(0)
            if self.way == "noise":
                noise = np.random.default_rng().normal(size=tuple(h.shape))
                h = h + torch.from_numpy(noise).to(h.dtype)
        return self.head(self.drop(h))


def eight_rows_are_refused():
    refused(
        CouplingError, "another example", lambda: attach(examples(), Tied("forward"))
    )


def backward_pass_alone_is_refused():
    refused(
        CouplingError, "backward pass", lambda: attach(examples(), Tied("backward"))
    )


def noise_of_its_own_is_refused():
    refused(CouplingError, "two equal", lambda: attach(examples(), Tied("noise")))


def another_mode_is_refused():
    model = Tied("mode")
    private = attach(examples(), model)
    model.drop.eval()
    x, _ = next(iter(private.loader))
    refused(CouplingError, "another example", lambda: private.model(x))


def mixup_is_refused():
    def mixup(x, generator):
        return 0.7 * x + 0.3 * x[torch.randperm(len(x), generator=generator)]

    refused(
        CouplingError, "the views", lambda: attach(examples(), linear(), augment=mixup)
    )


def own_generator_is_no_coupling():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.numbers = linear(), np.random.default_rng(0)

        def forward(self, x):
            noise = self.numbers.normal(size=tuple(x.shape)) * (len(x) >= SIZE)
            return self.layer(x + torch.from_numpy(noise).to(x.dtype))

    try:
        attach(examples(), Noisy())
    except CouplingError as error:
        raise AssertionError("an honest model is refused") from error


FAULTS = [
    Fault(
        "16 coupling from eight rows on",
        eight_rows_are_refused,
        (Patch(CouplingCheck._check, "self.rows < 2", "True"),),
    ),
    Fault(
        "16 coupling in the backward pass",
        backward_pass_alone_is_refused,
        (Patch(CouplingCheck._apart, "bool((by_row > self._allowed).any())", "False"),),
    ),
    Fault(
        "16 equal passes",
        noise_of_its_own_is_refused,
        (
            Patch(
                CouplingCheck._refuse_different,
                "not self._apart(one, same, everywhere)",
                "True",
            ),
        ),
    ),
    Fault(
        "16 another mode",
        another_mode_is_refused,
        (Patch(CouplingCheck.require_mode, "flags not in self._modes", "False"),),
    ),
    Fault(
        "16 the same generators",
        own_generator_is_no_coupling,
        (
            Patch(CouplingCheck._passed, "self._put_back()", "pass"),
            Patch(Generators.seed, "one.seed(number)", "pass"),
        ),
    ),
    Fault(
        "16 augmentation that mixes rows",
        mixup_is_refused,
        (
            Patch(
                augmenting._refuse_mixed,
                "not _equal(before[k % states][kept], after[kept])",
                "False",
            ),
        ),
    ),
]
