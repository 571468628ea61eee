"""Physical batches: every drawn example once, padded and masked."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from curvedp.errors import DataError
from curvedp.noise import RandomStreams, Stream
from curvedp.sampling import PhysicalLoader, PoissonSampler
from curvedp.sampling.physical import pad_batch, population

N = 23


class Numbers(Dataset):
    """Example i is (i + 1 three times, i), so that padding, zero, can be told."""

    def __init__(self, size=N):
        self.size, self.touched = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.touched.append(i)
        return torch.full((3,), float(i + 1)), i


def tensors(size=N):
    x = (torch.arange(size) + 1.0).unsqueeze(1).expand(-1, 3).contiguous()
    return TensorDataset(x, torch.arange(size))


class Fixed:
    """A sampler that draws what the test says."""

    def __init__(self, *draws):
        self.draws = draws

    def draw(self, step, population):
        return np.array(self.draws[step], dtype=np.int64)


def poisson(rate=0.4, seed=1):
    streams = RandomStreams(0, unsafe_reproducible_noise=seed)
    return PoissonSampler(rate, lambda step: streams.generator(Stream.SAMPLING, step))


def double(examples):
    """A collate function of the user's own; module level, so that it pickles."""
    x, y = zip(*examples, strict=True)
    return {"x": 2 * torch.stack(x), "y": torch.tensor(y), "kind": "doubled"}


@pytest.mark.parametrize("dataset", [Numbers(), tensors()], ids=["loader", "gather"])
@pytest.mark.parametrize("physical", [1, 4, 50])
def test_every_drawn_example_comes_once_and_the_rest_is_padding(dataset, physical):
    loader = PhysicalLoader(dataset, poisson(), physical)
    drawn = {step: poisson().draw(step, N).tolist() for step in range(8)}
    seen = {step: [] for step in drawn}
    complete = []
    for batch in loader.steps(0, 8):
        x, y = batch.data
        assert x.shape == (physical, 3)
        assert y.shape == batch.present.shape == (physical,)
        assert batch.present.dtype == torch.bool
        assert torch.equal(x[batch.present, 0], y[batch.present] + 1.0)
        assert not x[~batch.present].any()
        assert not y[~batch.present].any()
        seen[batch.step] += y[batch.present].tolist()
        complete += [batch.step] * batch.completes
    assert seen == drawn
    assert complete == list(range(8)), "each step completes once, in order"
    assert max(map(len, drawn.values())) > 4, "some draws are larger than a portion"


@pytest.mark.parametrize("dataset", [Numbers(), tensors()], ids=["loader", "gather"])
def test_an_empty_draw_is_a_batch_of_padding(dataset):
    loader = PhysicalLoader(dataset, Fixed([], [3], []), 4)
    batches = list(loader.steps(0, 3))
    assert [b.step for b in batches] == [0, 1, 2]
    assert [int(b.present.sum()) for b in batches] == [0, 1, 0]
    assert all(b.completes for b in batches)
    for batch in (batches[0], batches[2]):
        x, y = batch.data
        assert x.shape == (4, 3)
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert not x.any()
        assert not y.any()


def test_a_draw_that_fills_its_portions_exactly_has_no_empty_one():
    batches = list(PhysicalLoader(tensors(), Fixed(range(8)), 4).steps(0, 1))
    assert [int(b.present.sum()) for b in batches] == [4, 4]
    assert [b.completes for b in batches] == [False, True]


def test_the_fast_path_gives_what_the_loader_gives():
    fast = PhysicalLoader(tensors(), poisson(), 4)
    slow = PhysicalLoader(Subset(tensors(), range(N)), poisson(), 4)
    pairs = list(zip(fast.steps(0, 6), slow.steps(0, 6), strict=True))
    assert len(pairs) > 6
    for a, b in pairs:
        assert (a.step, a.completes) == (b.step, b.completes)
        assert torch.equal(a.present, b.present)
        for x, y in zip(a.data, b.data, strict=True):
            assert torch.equal(x, y)
            assert x.dtype == y.dtype


def test_a_transforming_subclass_does_not_take_the_fast_path():
    class Negated(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return -x, y

    data = Negated(*tensors().tensors)
    (batch,) = PhysicalLoader(data, Fixed([5]), 2).steps(0, 1)
    assert batch.data[0][0].tolist() == [-6.0] * 3


def test_the_users_collate_function_is_kept():
    for dataset in (Numbers(), tensors()):
        loader = PhysicalLoader(dataset, Fixed([5, 2], []), 3, collate=double)
        first, empty = loader.steps(0, 2)
        assert first.data["x"][:, 0].tolist() == [12.0, 6.0, 0.0]
        assert first.data["kind"] == empty.data["kind"] == "doubled"
        assert empty.data["x"].shape == (3, 3)
        assert not empty.data["x"].any()


def test_workers_are_kept_and_give_the_same_batches():
    options = {"num_workers": 1, "prefetch_factor": 3}
    with_worker = PhysicalLoader(
        Numbers(), poisson(), 4, collate=double, options=options
    )
    plain = PhysicalLoader(Numbers(), poisson(), 4, collate=double)
    pairs = list(zip(with_worker.steps(2, 6), plain.steps(2, 6), strict=True))
    assert [a.step for a, _ in pairs] == [b.step for _, b in pairs]
    for a, b in pairs:
        assert torch.equal(a.data["x"], b.data["x"])
        assert torch.equal(a.present, b.present)


def test_a_later_start_gives_the_same_steps():
    loader = PhysicalLoader(tensors(), poisson(), 4)
    whole = [b for b in loader.steps(0, 6) if b.step >= 3]
    later = list(loader.steps(3, 6))
    assert len(whole) == len(later)
    for a, b in zip(whole, later, strict=True):
        assert torch.equal(a.data[1], b.data[1])


def test_only_drawn_examples_are_touched():
    data = Numbers()
    loader = PhysicalLoader(data, Fixed([7, 9]), 4)
    data.touched.clear()
    list(loader.steps(0, 1))
    assert sorted(data.touched) == [7, 9]


def test_the_template_has_shapes_and_no_values():
    for dataset, collate in ((Numbers(), None), (tensors(), None), (Numbers(), double)):
        template = PhysicalLoader(dataset, Fixed([]), 4, collate=collate).template()
        leaves = torch.utils._pytree.tree_leaves(template)
        shapes = [x for x in leaves if isinstance(x, torch.Tensor)]
        assert {tuple(x.shape) for x in shapes} == {(1, 3), (1,)}
        assert all(not x.any() for x in shapes)


class Stream_(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3)


class NoLength(Dataset):
    def __getitem__(self, i):
        return torch.zeros(3)


@pytest.mark.parametrize("dataset", [Stream_(), NoLength(), iter([1, 2])])
def test_a_dataset_without_length_or_indexing_is_refused(dataset):
    with pytest.raises(DataError, match="map-style"):
        PhysicalLoader(dataset, Fixed([]), 4)


def test_an_empty_dataset_is_refused():
    with pytest.raises(DataError, match="empty"):
        population(tensors(0))
    assert population([1, 2, 3]) == 3


@pytest.mark.parametrize(
    "collate",
    [
        lambda examples: torch.tensor(1.0),
        lambda examples: "no tensor",
        lambda examples: torch.stack([x for x, _ in examples], 1),
        lambda examples: torch.cat([x for x, _ in examples]),
    ],
    ids=["scalar", "text", "examples-last", "flattened"],
)
def test_a_collate_function_without_a_row_for_each_example_is_refused(collate):
    with pytest.raises(DataError, match="one row per example"):
        PhysicalLoader(Numbers(), Fixed([]), 4, collate=collate)


def test_padding_keeps_structure_dtype_and_rows():
    batch = {
        "x": torch.ones(2, 3, dtype=torch.bfloat16),
        "mask": [torch.ones(2, dtype=torch.bool), "text"],
    }
    padded = pad_batch(batch, 5)
    assert padded["x"].dtype == torch.bfloat16
    assert padded["x"].sum(1).tolist() == [3, 3, 0, 0, 0]
    assert padded["mask"][0].tolist() == [True, True, False, False, False]
    assert padded["mask"][1] == "text"
    assert pad_batch(batch, 2)["x"] is batch["x"]


def test_a_batch_shows_nothing_in_its_repr():
    (batch,) = PhysicalLoader(tensors(), Fixed([5]), 2).steps(0, 1)
    assert "tensor" not in repr(batch)


def test_without_views_or_people_a_unit_is_one_row():
    loader = PhysicalLoader(tensors(), poisson(), 4)
    assert (loader.views, loader.slots, loader.shown) == (1, 1, None)
