"""The rows that are computed at once, where the user does not say."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.layers import Batch, cover, synthesiser_like
from curvedp.train.settings import (
    CPU_PART_BYTES,
    LARGEST_DEFAULT,
    SMALLEST_PART,
    default_physical_batch_size,
)


@pytest.mark.parametrize("expected", [1, 10, 64, 256, 1000, 1e5])
def test_small_models_take_most_draws_at_once(expected):
    rows = default_physical_batch_size(expected)
    assert rows % 8 == 0
    assert rows == LARGEST_DEFAULT or rows >= expected + 2 * expected**0.5 or rows < 512
    if expected <= 256:
        assert expected + 2 * expected**0.5 <= rows < expected + 2 * expected**0.5 + 8


def test_on_a_cpu_activations_bound_a_part_and_parts_are_even():
    each = CPU_PART_BYTES // 100
    rows = default_physical_batch_size(256, each)
    assert rows == 96  # 288 rows in three parts of at most 100
    assert default_physical_batch_size(256, each, "cuda") == 288
    huge = default_physical_batch_size(256, CPU_PART_BYTES)
    assert SMALLEST_PART <= huge <= SMALLEST_PART + 8


def test_activations_are_counted_once_and_without_parameters():
    model = nn.Sequential(nn.Linear(1000, 8), nn.ReLU(), nn.Linear(8, 2))
    template = Batch(torch.zeros(1, 1000), torch.zeros(1, dtype=torch.int64))
    held = cover(model, synthesiser_like(template, model)).activation_bytes
    # the inputs of both layers; what the rectifier saves is the second's input
    assert held == 4 * (1000 + 8)


def test_the_loader_yields_such_parts():
    data = TensorDataset(torch.zeros(4000, 3), torch.zeros(4000, dtype=torch.int64))
    model = nn.Linear(3, 2)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        loss="cross-entropy",
        noise_multiplier=1.0,
        sample_rate=0.064,
        steps=1,
        expected_batch_size=256,
        delta=1e-6,
    )
    x, _ = next(iter(private.loader))
    assert len(x) == 288
