"""A collate function gives each example its row, or it is refused."""

from __future__ import annotations

import pickle
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from curvedp.errors import ConfigurationError, DataError
from curvedp.sampling import People, PhysicalLoader
from curvedp.sampling.records import MadeUpRecords
from curvedp.sampling.rows import RowCollate

from ..faults.cases import attach
from ..faults.mutate import Patch, planted

CLIP = 0.1


class Documents(Dataset):
    """Texts of different lengths: (numbers, label)."""

    def __init__(self, size=24, least=2):
        r = torch.Generator().manual_seed(0)
        lengths = torch.randint(least, 9, (size,), generator=r).tolist()
        self.x = [torch.rand(n, 4, generator=r) for n in lengths]
        self.y = torch.randint(0, 3, (size,), generator=r).tolist()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def means(examples):
    """Of each document; lengths do not show in the shapes."""
    return (
        torch.stack([x.mean(0) for x, _ in examples]),
        torch.tensor([y for _, y in examples]),
    )


def sorted_by_length(examples):
    return means(sorted(examples, key=lambda e: -len(e[0])))


def sorted_by_label(examples):
    return means(sorted(examples, key=lambda e: e[1]))


def reversed_rows(examples):
    return means(examples[::-1])


def without_short_ones(examples):
    return means([e for e in examples if len(e[0]) > 3] or examples[:1])


def split_in_two(examples):
    halves = [(x[k::2], y) for x, y in examples for k in range(min(2, len(x)))]
    return means(halves)


def centred(examples):
    x, y = means(examples)
    return x - x.mean(0), y


def centred_from_eight_on(examples):
    return centred(examples) if len(examples) >= 8 else means(examples)


def with_the_longest(examples):
    """A feature that counts in units of the batch's longest."""
    x, y = means(examples)
    lengths = torch.tensor([float(len(x)) for x, _ in examples])
    x[:, 0] = lengths / lengths.max()
    return x, y


def cut_to_the_shortest(examples):
    least = min(len(x) for x, _ in examples)
    return means([(x[:least], y) for x, y in examples])


def padded_with_the_neighbour(examples):
    filler = examples[-1][0]
    longest = max(len(x) for x, _ in examples)
    rows = [torch.cat([x, filler.repeat(9, 1)])[:longest] for x, _ in examples]
    return torch.stack(rows), torch.tensor([y for _, y in examples])


ATTACKS = [
    sorted_by_length,
    sorted_by_label,
    reversed_rows,
    split_in_two,
    centred,
    centred_from_eight_on,
    with_the_longest,
    cut_to_the_shortest,
    padded_with_the_neighbour,
]


@pytest.mark.parametrize("collate", ATTACKS)
def test_a_row_that_is_not_its_examples_is_refused(collate):
    with pytest.raises(DataError, match="row"):
        RowCollate.of(Documents(), collate)


def test_sorting_by_what_a_dataset_has_padded_is_refused():
    x = [torch.tensor([3, 2, 1, 0]), torch.tensor([4, 0, 0, 0])]

    def collate(examples):
        return torch.stack(sorted(examples, key=lambda ids: int((ids > 0).sum())))

    with pytest.raises(DataError, match="sorts"):
        RowCollate.of(x, collate)
    RowCollate.of(x, torch.stack)


def trimmed(examples):
    """Off what is zero in all of them."""
    ids = torch.stack([x for x, _ in examples])
    ids = ids[:, : int((ids > 0).sum(1).max().clamp_min(1))]
    return ids, torch.tensor([y for _, y in examples])


def test_a_function_that_trims_padding_is_tried():
    data = [(torch.tensor([3, 2, 1, 0]), 0), (torch.tensor([4, 0, 0, 0]), 1)]
    assert ("[0]", 1) in RowCollate.of(data, trimmed).free


def test_a_function_may_take_its_records_to_pieces():
    def collate(examples):
        y = torch.tensor([e.pop("y") for e in examples])
        return torch.stack([e.pop("x") for e in examples]), y

    def records():
        return [{"x": torch.rand(3), "y": k} for k in range(3)]

    RowCollate.of(records(), collate)
    sample = records()
    RowCollate.of(records(), collate, sample)
    assert all(len(record) == 2 for record in sample)


def test_a_worker_gets_it_without_records():
    tried = pickle.loads(pickle.dumps(RowCollate.of(Documents(), means)))
    assert tried([Documents()[0]])[0].shape == (1, 4)


def moved_by_one_person(collate, persons=11, physical=64):
    """How far the sum moves when a person leaves, over C."""

    def summed(keep):
        data = Documents(4 * persons)
        ids = [i % persons for i in range(len(data))]
        data.x = [x for x, p in zip(data.x, ids, strict=True) if p in keep]
        data.y = [y for y, p in zip(data.y, ids, strict=True) if p in keep]
        private = attach(
            data,
            collate_fn=collate,
            people=[p for p in ids if p in keep],
            examples_per_person=4,
            rate=1.0,
            steps=1,
            clip_norm=CLIP,
            physical_batch_size=physical,
        )
        for x, y in private.loader:
            private.loss(private.model(x), y).backward()
            private._engine.accumulate()
        return torch.cat(
            [t.flatten() for t in private._engine._open.pending.values.values()]
        )

    everybody = set(range(persons))
    return float((summed(everybody) - summed(everybody - {3})).norm()) / CLIP


def test_rows_stay_with_their_person():
    assert moved_by_one_person(means) <= 1 + 1e-4
    for collate in (sorted_by_length, without_short_ones):
        with pytest.raises(DataError):
            moved_by_one_person(collate)
    with planted(Patch(RowCollate.of.__func__, "trial._try_order()", "")):
        assert moved_by_one_person(sorted_by_length) > 2


class Fixed:
    def __init__(self, *drawn):
        self.drawn = np.array(drawn, dtype=np.int64)

    def draw(self, step, population):
        return self.drawn


def rare(examples):
    """Does what it should until it meets a document that it was not tried on."""
    kept = [e for e in examples if not (e[0] > 7).any()]
    doubled = [e for e in examples if (e[0] < -7).any()]
    return means(kept + doubled)


@pytest.mark.parametrize(("value", "workers"), [(8.0, 0), (-8.0, 0), (-8.0, 1)])
def test_rows_are_counted_in_every_portion(value, workers):
    data = Documents()
    data.x[5][0, 0] = value
    options = {"num_workers": workers}
    loader = PhysicalLoader(data, Fixed(3, 5), 2, collate=rare, options=options)
    with pytest.raises(DataError, match="number of rows") as refusal:
        list(loader.steps(0, 1))
    assert "8.0" not in str(refusal.value)
    if workers:
        return
    broken = pytest.raises(RuntimeError) if value < 0 else nullcontext()
    with (
        broken,
        planted(Patch(RowCollate.__call__, "x.shape[0] != len(examples)", "False")),
    ):
        list(loader.steps(0, 1))


def test_no_private_record_goes_through_collate_when_attaching():
    seen = []

    def watched(examples):
        seen.extend(float(x.max()) for x, _ in examples)
        return means(examples)

    data = Documents()
    data.x[0] += 1000
    PhysicalLoader(data, Fixed(), 4, collate=watched)
    assert seen and max(seen) <= 1


def noisy(examples):
    x, y = means(examples)
    return x + torch.randn_like(x), y


def masked(examples):
    """Numbers that are left out at random, as a masked language model does it."""
    x, y = means(examples)
    x[torch.rand_like(x) < 0.3] = 0.0
    return x, y + 0 * random.randint(0, 3) + 0 * int(np.random.randint(3))


class OwnGenerator:
    def __init__(self, sort=False):
        self.generator, self.sort = torch.Generator().manual_seed(0), sort

    def __call__(self, examples):
        x, y = (sorted_by_length if self.sort else means)(examples)
        x[torch.rand(x.shape, generator=self.generator) < 0.3] = 0.0
        return x, y


def masked_and_sorted(examples):
    x, y = sorted_by_length(examples)
    x[torch.rand_like(x) < 0.3] = 0.0
    return x, y


def test_a_function_that_draws_is_compared_on_what_it_does_not_draw():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for collate in (noisy, masked, OwnGenerator()):
        RowCollate.of(Documents(), collate)
    for collate in (masked_and_sorted, OwnGenerator(sort=True)):
        with pytest.raises(DataError, match="sorts"):
            RowCollate.of(Documents(), collate)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def padded(examples):
    x = pad_sequence([x for x, _ in examples], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in examples])
    return {"x": x, "lengths": lengths}, torch.tensor([y for _, y in examples])


def mixed_up(examples):
    x, y = means(examples)
    part = float(np.random.beta(1, 1))
    return part * x + (1 - part) * x[torch.randperm(len(x))], y


def mixed_now_and_then(examples):
    x, y = means(examples)
    return (0.5 * x + 0.5 * x.flip(0) if random.random() < 0.2 else x), y


def noisy_then_centred(examples):
    x, y = noisy(examples)
    return x - x.mean(0), y


def noisy_by_itself(examples):
    x, y = means(examples)
    r = torch.Generator().manual_seed(int(np.random.default_rng().integers(99999)))
    x = x + torch.randn(x.shape, generator=r)
    return x - x.mean(0), y


@pytest.mark.parametrize(
    "mixes", [mixed_up, mixed_now_and_then, noisy_then_centred, noisy_by_itself]
)
def test_a_function_that_draws_and_mixes_is_refused(mixes):
    with pytest.raises(DataError, match="mixes"):
        RowCollate.of(Documents(), mixes)


def test_what_is_padded_is_found():
    tried = RowCollate.of(Documents(), padded)
    assert tried.free == {("[0]['x']", 1)}
    assert RowCollate.of(Documents(), means).free == frozenset()


def test_a_length_that_was_not_tried_is_refused():
    def wider(examples):  # in a way that no made-up record shows
        (inputs, y) = padded(examples)
        extra = int(max(float(x.max()) for x, _ in examples) > 1)
        return {**inputs, "x": torch.nn.functional.pad(inputs["x"], (0, extra))}, y

    data = Documents()
    data.x[5] += 1
    loader = PhysicalLoader(data, Fixed(3, 5), 2, collate=wider)
    with pytest.raises(DataError, match="varies"):
        list(loader.steps(0, 1))


RECORDS = [
    {"ids": [1, 2, 3], "label": 1},
    (np.zeros((2, 3), np.uint8), np.int64(3), np.float32(0.5), None, True),
    [torch.zeros(3, dtype=torch.bfloat16), torch.tensor(True), "two words"],
    {"words": ["a", "b"], "image": [[1.0, 2.0], [3.0, 4.0]], "raw": b"abc", "no": []},
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_made_up_of_types_and_shapes(record):
    made = MadeUpRecords(record).make(1)
    parts = [torch.utils._pytree.tree_flatten(x) for x in (record, made)]
    assert parts[0][1] == parts[1][1]
    for x, y in zip(parts[0][0], parts[1][0], strict=True):
        assert type(x) is type(y)
        assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
        assert getattr(x, "shape", None) == getattr(y, "shape", None)


def test_images_are_made_up():
    image = pytest.importorskip("PIL.Image")
    for mode in ("RGB", "L", "RGBA"):
        made = MadeUpRecords(image.new(mode, (5, 4))).make(0)
        assert (made.mode, made.size) == (mode, (5, 4))


class Odd:
    """A record of a class that nobody knows."""

    def __init__(self, i):
        self.x = torch.full((4,), float(i))


class Odds(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return Odd(i)


def stacked(examples):
    return torch.stack([e.x for e in examples]), torch.zeros(len(examples)).long()


def sample(*numbers):
    return [Odd(i) for i in numbers]


def test_public_examples_stand_in_for_what_cannot_be_made_up():
    with pytest.raises(DataError, match="sample="):
        attach(Odds(), collate_fn=stacked)
    attach(Odds(), collate_fn=stacked, sample=sample(100, 200, 300))
    with pytest.raises(DataError, match="sorts"):
        attach(Odds(), collate_fn=lambda e: stacked(e[::-1]), sample=sample(1, 2))
    with pytest.raises(DataError, match="at least two"):
        attach(Odds(), collate_fn=stacked, sample=sample(1))
    with pytest.raises(ConfigurationError, match="sample"):
        attach(Documents(), sample=sample(1, 2))


def test_a_function_that_fails_on_made_up_records_asks_for_public_ones():
    names = {"yes": 1, "no": 0}

    def looked_up(examples):
        return torch.rand(len(examples), 4), torch.tensor([names[e] for e in examples])

    with pytest.raises(DataError, match=r"(?s)raised KeyError.*sample="):
        RowCollate.of(["yes", "no"], looked_up)
    # and a small table is found
    RowCollate.of([3, 1], lambda e: torch.eye(4)[torch.tensor(e)])


def test_arrays_and_lists_of_persons_are_refused():
    with pytest.raises(DataError, match="arrays"):
        RowCollate.of(Documents(), lambda e: (means(e)[0], np.zeros(len(e))))

    class Named(Documents):
        def __getitem__(self, i):
            return {"x": self.x[i][0], "name": "somebody"}

    PhysicalLoader(Named(), Fixed(), 4)
    with pytest.raises(DataError, match="list with an entry"):
        PhysicalLoader(Named(), Fixed(), 4, people=People(list(range(24)), 2))


def test_collate_of_a_data_loader_with_workers_is_tried_once():
    loader = DataLoader(Documents(), collate_fn=means, num_workers=1, batch_size=4)
    private = attach(loader, steps=1)
    assert isinstance(private._engine._loader._collate, RowCollate)
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
