"""A portion is released once, in its order, with the rows that the dataset gave."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from curvedp.data.source import ArrayDataset
from curvedp.errors import ConfigurationError, DataError, LoopError
from curvedp.sampling import People, PhysicalLoader
from curvedp.train.engine import Engine

from ..faults.cases import attach, examples, linear
from ..faults.mutate import Patch, planted


def two_iterators_move_the_sum_by():
    """How far a step's sum is from that of one iterator, over C."""

    def pending(iterators):
        private = attach(examples(), rate=1.0, steps=1, clip_norm=0.1)
        walks = [iter(private.loader) for _ in range(iterators)]
        for _ in range(2):
            for walk in walks:
                x, y = next(walk)
                private.loss(private.model(x), y).backward()
                private._engine.accumulate()
        return private._engine._open.pending.values

    one, both = pending(1), pending(2)
    return float(sum((one[n] - both[n]).square().sum() for n in one).sqrt()) / 0.1


def test_an_iterator_that_is_not_the_newest_gives_nothing():
    with pytest.raises(LoopError, match="another pass over"):
        two_iterators_move_the_sum_by()
    with planted(Patch(Engine.batches, "if self._walk is not walk:", "if False:")):
        assert two_iterators_move_the_sum_by() > 1


def test_a_new_iterator_begins_the_step_again():
    private = attach(examples(), rate=1.0, steps=2)
    old = iter(private.loader)
    x, y = next(old)
    private.loss(private.model(x), y).backward()
    for count, (x, y) in enumerate(private.loader):
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if count == 3:
            with pytest.raises(LoopError, match="another pass"):
                next(old)
    assert private.step == private._engine.ledger.count() == 2


def test_options_that_change_the_order_are_refused():
    options = {"num_workers": 2, "in_order": False}
    with pytest.raises(ConfigurationError, match="in_order"):
        attach(examples(), loader_options=options)
    # of a DataLoader they are left behind, as its sampler is
    attach(DataLoader(examples(), **options))
    attach(examples(), loader_options={"num_workers": 2, "in_order": True})


def test_an_unknown_option_is_named():
    with pytest.raises(ConfigurationError, match="num_worker"):
        attach(examples(), loader_options={"num_worker": 2})
    with pytest.raises(ConfigurationError, match="dataset"):
        attach(examples(), loader_options={"dataset": examples()})


class Counted(IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        yield from zip(*examples(8).tensors, strict=True)


def test_a_stream_with_a_length_is_refused_by_name():
    for dataset in (Counted(), DataLoader(Counted())):
        with pytest.raises(DataError, match=r"(?s)Counted.*map-style"):
            attach(dataset)


class Fixed:
    """Draws what the test says."""

    def __init__(self, *drawn):
        self.drawn = torch.tensor(drawn).numpy()

    def draw(self, step, population):
        return self.drawn


class Doubled(TensorDataset):
    """Gives other rows than its tensors hold."""

    def __getitems__(self, rows):
        return [(2 * self.tensors[0][i], self.tensors[1][i]) for i in rows]


class DoubledArrays(ArrayDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


@pytest.mark.parametrize("kind", [Doubled, DoubledArrays])
def test_what_a_subclass_gives_is_what_is_trained_on(kind):
    data = examples()
    loader = PhysicalLoader(kind(*data.tensors), Fixed(3, 1), 4)
    (batch,) = loader.steps(0, 1)
    assert torch.equal(batch.data[0][:2], 2 * data.tensors[0][[3, 1]])


def test_an_empty_draw_asks_for_nothing():
    class Stacked(Doubled):
        def __getitems__(self, rows):
            torch.stack([self.tensors[0][i] for i in rows])  # fails where there is none
            return super().__getitems__(rows)

    loader = PhysicalLoader(Stacked(*examples().tensors), Fixed(), 4)
    (batch,) = loader.steps(0, 1)
    assert not batch.present.any() and not batch.data[0].any()


class Sorted(Dataset):
    """Reads a file from its beginning to its end, whatever it is asked for."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((2,), float(i)), 0

    def __getitems__(self, rows):
        return [self[i] for i in sorted(rows)]


class Lossy(Sorted):
    def __getitems__(self, rows):
        return [self[i] for i in rows[:-1]]


def test_rows_that_are_fetched_together_stay_with_their_person():
    people = People([0, 1, 2, 0, 1, 2], 2)
    loader = PhysicalLoader(Sorted(), Fixed(2, 0, 1), 6, people=people)
    (batch,) = loader.steps(0, 1)
    assert batch.data[0][:, 0].tolist() == [2, 5, 0, 3, 1, 4]


def test_fewer_examples_than_were_asked_for_are_refused():
    loader = PhysicalLoader(Lossy(), Fixed(2, 0, 1), 6)
    with pytest.raises(DataError, match="__getitems__"):
        list(loader.steps(0, 1))


def test_pinned_memory_and_workers_train():
    data = DataLoader(examples(), num_workers=1, pin_memory=True, batch_size=3)
    private = attach(data, nn.Sequential(linear(), nn.Tanh(), nn.Linear(3, 3)), steps=2)
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
    assert private.step == 2
