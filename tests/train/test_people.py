"""The person as the unit: sampled, clipped and accounted as a whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer
from curvedp.clipping import bounded
from curvedp.errors import ConfigurationError
from curvedp.layers.grouping import grouped
from curvedp.sampling import People

from ..faults.cases import attach, examples, train
from ..faults.mutate import Patch, planted

CLIP = 0.3
SLACK = 1e-6


class Everything(nn.Module):
    """An embedding, a convolution, a norm, a linear layer and a token of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        h = (self.table(ids) + self.token).transpose(1, 2)
        return self.head(self.norm(torch.tanh(self.conv(h))).mean(2))


def sentences(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (n, 5), generator=generator)
    return TensorDataset(ids, torch.randint(0, 3, (n,), generator=generator))


def clipped(dataset, people, slots, model, **options):
    """The clipped sum over everybody, flattened, by parameter order."""
    private = attach(
        dataset,
        model,
        rate=1.0,
        steps=1,
        people=people,
        examples_per_person=slots,
        clip_norm=CLIP,
        **options,
    )
    engine = private._engine
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        if engine.accumulate():
            break
    values = engine._open.pending.values
    return torch.cat([values[n].flatten() for n, _ in model.named_parameters()])


def reference(dataset, people, model):
    """One person at a time, by autograd."""
    x, y = dataset.tensors
    total = 0
    for person in sorted(set(people)):
        mine = torch.tensor([p == person for p in people])
        loss = F.cross_entropy(model(x[mine]), y[mine], reduction="sum")
        grads = torch.autograd.grad(loss, list(model.parameters()))
        g = torch.cat([g.flatten() for g in grads])
        total = total + g * min(1.0, CLIP / float(g.norm()))
    return total


@pytest.mark.parametrize("physical", [4, 9, 64])
def test_persons_are_clipped_as_a_whole(physical):
    torch.manual_seed(0)
    model = Everything()
    data, people = sentences(12), [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 0]
    ours = clipped(data, people, 4, model, physical_batch_size=physical)
    expected = reference(data, people, model)
    # contributions are shortened a little, for the rounding of a batch
    assert (ours - expected).norm() <= 3e-4 * expected.norm()


def one_person_moves_the_sum():
    """How far the sum moves when a person with four examples leaves, over C."""
    torch.manual_seed(0)
    model = Everything()
    data, people = sentences(12), [0, 1, 2, 3, 9, 4, 9, 5, 9, 6, 9, 7]
    stay = torch.tensor([p != 9 for p in people])
    rest = TensorDataset(*(t[stay] for t in data.tensors))
    with_person = clipped(data, people, 4, model)
    without = clipped(rest, [p for p in people if p != 9], 4, model)
    return float((with_person - without).norm()) / CLIP


def test_a_whole_person_moves_the_sum_by_the_bound_at_most():
    assert one_person_moves_the_sum() <= 1 + SLACK
    # and by more, if examples were clipped one by one
    with planted(Patch(bounded.clipped_sum, "if slots > 1:", "if False:")):
        assert one_person_moves_the_sum() > 1.5


def test_slots_without_an_example_contribute_nothing():
    torch.manual_seed(0)
    model = Everything()
    data = sentences(5)
    tight = clipped(data, [0, 0, 1, 1, 2], 2, model)
    roomy = clipped(data, [0, 0, 1, 1, 2], 7, model, physical_batch_size=30)
    torch.testing.assert_close(tight, roomy, rtol=1e-5, atol=1e-7)
    # padding is dropped before it is added up, not after
    with (
        planted(Patch(bounded.clipped_sum, "io.keep(present)", "io")),
        pytest.raises(AssertionError),
    ):
        wrong = clipped(data, [0, 0, 1, 1, 2], 7, model, physical_batch_size=30)
        torch.testing.assert_close(tight, wrong, rtol=1e-5, atol=1e-7)


def test_a_broken_example_drops_its_person_alone():
    x, y = examples(12).tensors
    x[3] = float("nan")
    people = [i // 2 for i in range(12)]
    model = nn.Linear(4, 3)
    ours = clipped(TensorDataset(x, y), people, 2, model)
    keep = torch.tensor([p != 1 for p in people])
    rest = TensorDataset(x[keep], y[keep])
    expected = reference(rest, [p for p in people if p != 1], model)
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, expected, rtol=3e-4, atol=1e-7)


def test_all_examples_take_their_turn():
    people = People(["a"] * 5 + ["b"], slots=2)
    assert len(people) == 2
    seen = {int(i) for step in range(5) for i in people.rows(0, step)}
    assert seen == {0, 1, 2, 3, 4}
    assert all(len(people.rows(0, step)) == 2 for step in range(5))
    assert people.rows(1, 3).tolist() == [5]


def test_the_unit_is_in_the_statement_the_ledger_and_the_size():
    private = attach(
        examples(),
        people=[i // 3 for i in range(24)],
        examples_per_person=3,
        sample_rate=None,
        steps=None,
        expected_batch_size=None,
        batch_size=2,
        epochs=1,
        delta=1e-3,
    )
    assert private.plan.sampling.public_size == 8
    assert private.plan.sampling.sample_rate == 2 / 8
    assert private._engine.ledger.header.unit == "person"
    assert private.statement().facts["unit"] == "person"
    assert "one person, with all examples (at most 3" in str(private.statement())
    train(private)


def test_tensor_ids_and_the_trainer():
    ids = torch.arange(24) // 4
    assert len(People(ids, 2)) == 6
    trainer = Trainer(
        nn.Linear(4, 3),
        "cross-entropy",
        noise_multiplier=1.0,
        sample_rate=0.5,
        steps=2,
        expected_batch_size=3,
        people=ids,
        examples_per_person=4,
    )
    assert trainer.fit(examples()).steps == 2


def test_bad_declarations_are_named():
    for options, words in (
        ({"people": [0] * 24}, "belong together"),
        ({"examples_per_person": 2}, "belong together"),
        ({"people": [0] * 5, "examples_per_person": 2}, "one id for each example"),
        ({"people": [0] * 24, "examples_per_person": 0}, "examples_per_person"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            attach(examples(), **options)


def test_one_slot_changes_nothing():
    marker = object()
    assert grouped(marker, 1) is marker
