"""The attacks on a pass, where it is traced for a compiler or recorded as a graph."""

import pytest
import torch
from torch import nn

from curvedp.errors import ConfigurationError, CurvedpError, LoopError
from curvedp.layers import Batch, synthesiser_like
from curvedp.train.losses import LOSSES

from ..faults.cases import attach
from .test_graph import Twin
from .test_state_past_noise import (
    FEATURES,
    MARK,
    WEIGHTS,
    as_extra_state,
    attribute,
    by_data,
    by_numpy,
    codebook,
    in_a_holder,
    keeps,
    new_buffer,
    private_of,
    rows,
)

LOSS = LOSSES["cross-entropy"]
pytestmark = pytest.mark.hostile


def traced(private):
    template = private._engine._loader.template()

    synthetic = synthesiser_like(Batch(*template), private._engine.model)
    private._passed = private._engine.compiled(LOSS, synthetic, "eager")
    return private


def recorded(private):
    private._passed = private._engine.graphed(LOSS, Twin())
    return private


def both(private):
    traced(private)
    return recorded(private)


WAYS = (by_data, by_numpy, new_buffer, codebook, attribute, in_a_holder, as_extra_state)
every_mode = pytest.mark.parametrize("mode", [traced, recorded, both])


def mean_is_held(model):
    """Whether the mean of the private rows can be told from what leaves."""
    found = [*model.state_dict().values(), vars(model).get("last")]
    for module in model.modules():
        found += [v for k, v in vars(module).items() if not k.startswith("_")]
    tensors = [torch.as_tensor(x).float() for x in found if isinstance(x, LIKE)]
    return any(bool((x.abs() > MARK / 4).any()) for x in tensors)


LIKE = (torch.Tensor, float)


@every_mode
@pytest.mark.parametrize("write", WAYS, ids=lambda w: w.__name__)
def test_what_a_pass_writes_does_not_stay(write, mode):
    """Where Python runs only while it is recorded, what it wrote then is put back."""
    model = keeps(write)
    private = mode(private_of(model))
    model.told = True
    try:
        for batch in private.loader:
            private.train_on(batch)
            if mode is not traced:
                break  # a replay runs no Python; the twin of one would
        paid = False
    except CurvedpError:
        paid = private._engine.ledger.count() > 0
    assert not paid
    if write not in WEIGHTS:
        assert not mean_is_held(model)
    else:
        frozen = [model.code, *[b for _, b in model.named_buffers()]]
        assert all(bool((x.abs() < MARK / 4).all()) for x in frozen)


@every_mode
def test_other_rows_than_the_loaders_are_refused(mode):
    private = mode(private_of(nn.Linear(FEATURES, 3)))
    for x, y in private.loader:
        for changed in ((x.flip(0), y.flip(0)), (x - x.mean(0), y), (x, y.roll(1))):
            with pytest.raises(LoopError, match="was not given"):
                private.train_on(changed)
        break
    assert private._engine.ledger.count() == 0


@every_mode
def test_a_model_that_was_changed_is_refused(mode):
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3))
    private = mode(private_of(model))
    for batch in private.loader:
        model[1].register_forward_hook(lambda m, a, out: out - out.mean(0))
        with pytest.raises(LoopError, match="forward hook"):
            private.train_on(batch)
        break
    assert private._engine.ledger.count() == 0


@pytest.mark.parametrize("mode", [{"compile": True}, {}])
def test_coupling_is_found_before_anything_is_compiled(mode):
    class Groups(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(FEATURES, 3)

        def forward(self, x):
            y = self.inner(x)
            return y if len(y) < 8 else y - y.mean(0)

    with pytest.raises(CurvedpError, match="another example"):
        attach(rows(), Groups(), physical_batch_size=8, **mode)


def test_a_graph_needs_a_gpu_and_touches_nothing_without(tmp_path):
    with pytest.raises(ConfigurationError, match="CUDA"):
        attach(rows(), nn.Linear(FEATURES, 3), cuda_graph=True, run_dir=tmp_path / "r")
    assert not (tmp_path / "r").exists()
