"""How the tests attach a small classifier, and see that it is left as it was."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvedp.layers import Batch, cover, synthesiser_like

TEMPLATE = Batch(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))


def cross_entropy(output, targets):
    return F.cross_entropy(output, targets, reduction="none")


def covered(model, *shape, loss=cross_entropy, dtype=torch.float32):
    """Cover a classifier of inputs ``shape``; the kinds of its sites by name."""
    inputs = torch.zeros(1, *shape, dtype=dtype)
    template = Batch(inputs, None if loss is None else TEMPLATE.targets)
    coverage = cover(model, synthesiser_like(template, model), loss)
    return {item.site.name: item.site.kind for item in coverage.covered}


def refused(error, named, model, *shape, **options):
    with pytest.raises(error, match=re.escape(named)) as caught:
        covered(model, *shape, **options)
    assert caught.value.advice, "a refusal says what to do"
    assert_untouched_hooks(model)
    return str(caught.value)


def assert_untouched_hooks(model):
    for module in model.modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            assert not getattr(module, kind), f"{kind} left on {module}"


class Custom(nn.Module):
    """A model whose forward pass is a function of its layers."""

    def __init__(self, forward, **layers):
        super().__init__()
        self._function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self._function(self, *inputs)


def snapshot(model):
    return {
        "modes": [m.training for m in model.modules()],
        "state": {n: t.clone() for n, t in model.state_dict().items()},
        "objects": [id(p) for p in model.parameters()],
        "trainable": [p.requires_grad for p in model.parameters()],
    }


def assert_same(model, before):
    after = snapshot(model)
    for name in ("modes", "objects", "trainable"):
        assert after[name] == before[name]
    for name, value in before["state"].items():
        assert torch.equal(after["state"][name], value)
    assert all(p.grad is None for p in model.parameters())
    assert_untouched_hooks(model)
