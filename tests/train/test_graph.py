"""A recorded pass: the same sums as without, wherever a graph could go stale.

A CPU records nothing. Here a pass is repeated by running it again into the memory of
its first run, which is what a replay does; ``benchmarks/graph_check.py`` compares real
graphs on a GPU.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer, make_private
from curvedp.errors import ConfigurationError, LoopError
from curvedp.recipes import RECIPES
from curvedp.train.graph import CudaCapture
from curvedp.train.losses import LOSSES

from .test_whitened_recipes import PRIVATE, attach, examples, model

LOSS = LOSSES["cross-entropy"]


class Twin:
    """Repeats work by running it; ``count`` says how often a pass was recorded.

    Results stand where the first ones stood, as those of a replay do. What an earlier
    recording gave out is spoilt: graphs share their memory.
    """

    def __init__(self):
        self.count = 0
        self.back_maps = 0
        self.given = []

    def __call__(self, work, device):
        first = work()
        is_pass = isinstance(first, tuple)
        self.count += is_pass
        self.back_maps += not is_pass
        for place in self.given:
            place.fill_(float("nan"))
        places = tensors(first)
        self.given = places

        def replay():
            for place, value in zip(places, tensors(work()), strict=True):
                place.copy_(value)
            return first

        return replay


def tensors(result):
    if isinstance(result, tuple):
        part, *others = result
        return [*part.values.values(), *others]
    return list(result.values())


def graphed(private, **options):
    twin = Twin()
    private._passed = private._engine.graphed(LOSS, twin, **options)
    return private, twin


def train(private):
    losses = [float(private.train_on(batch)) for batch in private.loader]
    return losses, [p.detach().clone() for p in private.model.module.parameters()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("recipe", PRIVATE)
def test_a_recorded_run_is_the_same_to_the_bit(recipe):
    losses, weights = train(attach(examples(), recipe))
    private, twin = graphed(attach(examples(), recipe))
    found, recorded = train(private)
    assert found == losses
    assert same(recorded, weights)
    curvature = RECIPES[recipe].curvature
    refreshes = 1 if curvature is None else 3  # at steps 0, 3 and 6
    assert 1 <= twin.count <= refreshes  # some only change their numbers
    mapped = curvature is not None and curvature.read_out != "none"
    assert mapped <= twin.back_maps <= (refreshes if mapped else 0)


@pytest.mark.parametrize(
    "recipe", ["dp-kfc", "dp-kfc+adambc", "dp-ngd", "dp-soap", "gep"]
)
def test_a_refreshed_map_is_not_recorded_again(recipe, monkeypatch):
    # a bound that stays the same, however much such small nets' maps change
    monkeypatch.setattr("curvedp.whitening.roots._power_above", lambda _: 64.0)
    _, weights = train(attach(examples(), recipe))
    private, twin = graphed(attach(examples(), recipe))
    _, recorded = train(private)
    assert same(recorded, weights)
    assert twin.count == 1 and twin.back_maps <= 1


def test_a_map_of_another_make_is_recorded_again(monkeypatch):
    numbers = iter(2.0**n for n in range(8, 1000))
    monkeypatch.setattr("curvedp.whitening.roots._power_above", lambda _: next(numbers))
    private, twin = graphed(attach(examples(), "dp-kfc"))
    train(private)
    assert twin.count == 3


def test_a_sum_is_in_the_frame_of_the_map_at_hand(monkeypatch):
    monkeypatch.setattr("curvedp.whitening.roots._power_above", lambda _: 64.0)
    frames = []
    for record in (lambda private: private, lambda private: graphed(private)[0]):
        private = record(attach(examples(), "dp-kfc"))
        merge, own = private._engine._merge, []

        def told(part, opened, merge=merge, own=own):
            own.append(part.frame)
            return merge(part, opened)

        private._engine._merge = told
        train(private)
        frames.append(own)
    assert frames[0] == frames[1] and len(set(frames[0])) == 3


class Blind(Twin):
    """Repeats a pass with every way from a tensor to a Python value closed."""

    def __call__(self, work, device):
        work()  # as before a recording: what is computed once is computed here

        def replay():
            with pytest.MonkeyPatch.context() as patch:
                for name in ("__bool__", "__float__", "__int__", "item", "tolist"):
                    patch.setattr(torch.Tensor, name, looked_at)
                return work()

        return replay


def looked_at(*_):
    raise AssertionError("a recorded pass looked at a value")


@pytest.mark.parametrize("recipe", PRIVATE)
def test_a_pass_never_looks_at_values(recipe):
    private = attach(examples(), recipe)
    private._passed = private._engine.graphed(LOSS, Blind())
    train(private)
    assert private.step == 8


def test_a_loop_by_hand_is_the_same_too():
    _, weights = train(attach(examples(), "dp-kfc"))
    private = attach(examples(), "dp-kfc")
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
    assert same([p.detach() for p in private.model.module.parameters()], weights)


def test_an_example_that_is_not_finite_adds_nothing_in_a_graph():
    data = examples()
    data.tensors[0][5] = float("nan")
    data.tensors[0][6] = float("inf")
    _, weights = train(attach(data, "dp-kfc"))
    private, _ = graphed(attach(data, "dp-kfc"))
    _, recorded = train(private)
    assert same(recorded, weights)
    assert all(bool(w.isfinite().all()) for w in recorded)


@pytest.mark.parametrize("recipe", PRIVATE)
def test_a_pass_that_hopes_is_the_same_to_the_bit(recipe):
    _, weights = train(attach(examples(), recipe))
    private, twin = graphed(attach(examples(), recipe), hoped_bytes=0)
    _, recorded = train(private)
    assert same(recorded, weights)
    curvature = RECIPES[recipe].curvature
    assert twin.count <= (1 if curvature is None else 3)  # never the careful one


def test_a_hope_that_fails_is_thrown_away():
    data = examples()
    data.tensors[0][5] = float("nan")
    data.tensors[0][6] = float("inf")
    data.tensors[0][7] = 1e30
    _, weights = train(attach(data, "dp-kfc"))
    private, twin = graphed(attach(data, "dp-kfc"), hoped_bytes=0)
    _, recorded = train(private)
    assert same(recorded, weights)
    assert all(bool(w.isfinite().all()) for w in recorded)
    assert twin.count > 1  # some batches had none of these examples, and some had


def test_only_large_passes_hope():
    small = attach(examples(), "dp-sgd")
    held = small._engine._coverage.activation_bytes * small._engine.physical_batch_size
    assert held > 0
    for bound, expected in ((held, True), (held + 1, False)):
        assert graphed(small, hoped_bytes=bound)[0]._passed._hopes is expected


def test_dropout_and_modes_are_not_frozen():
    own = nn.Sequential(
        nn.Flatten(), nn.Linear(30, 8), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    private, twin = graphed(attach(examples(), "dp-sgd", own, steps=4))
    for number, batch in enumerate(private.loader):
        own[2].training = number % 2 == 0
        private.train_on(batch)
    assert twin.count == 2


def test_weights_that_move_in_memory_are_recorded_again():
    private, twin = graphed(attach(examples(), "dp-sgd", physical_batch_size=40))
    own = private.model.module
    for number, batch in enumerate(private.loader):
        if number == 3:
            own[0].weight.data = own[0].weight.data.clone()
        private.train_on(batch)
    assert twin.count == 2


class Ragged(torch.utils.data.Dataset):
    """Sequences, one of which is longer than the others."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.full((3 + (i == 5),), 1 + i % 6), i % 2


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        return self.head((self.table(ids) * (ids > 0).unsqueeze(-1)).sum(1))


def _collate(rows):
    ids = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return ids, torch.tensor([y for _, y in rows])


def test_every_shape_has_a_graph_of_its_own():
    def private():
        torch.manual_seed(0)
        own = Bag()
        return make_private(
            own, torch.optim.SGD(own.parameters(), lr=0.1), Ragged(),
            loss="cross-entropy", collate_fn=_collate, noise_multiplier=1.0,
            sample_rate=0.5, steps=12, expected_batch_size=12, physical_batch_size=24,
            seed=1, unsafe_reproducible_noise=1,
        )  # fmt: skip

    _, weights = train(private())
    recorded, twin = graphed(private())
    _, found = train(recorded)
    assert same(found, weights)
    assert twin.count == 2


def test_guards_hold_in_a_graph():
    private, _ = graphed(attach(examples(), "dp-sgd"))
    x, y = examples().tensors
    with pytest.raises(LoopError, match="without a batch from"):
        private.train_on((x[:8], y[:8]))
    for batch in private.loader:
        with pytest.raises(LoopError, match=r"given what private\.loader gave"):
            private.train_on([value.flip(0) for value in batch])
        private.model.module[0].weight.grad = torch.ones_like(
            private.model.module[0].weight
        )
        private._engine.optimizer.zero_grad = lambda *_: None
        with pytest.raises(LoopError, match="nobody has clipped it"):
            private.train_on(batch)
        break
    private.model.eval()
    with pytest.raises(LoopError, match="eval mode"):
        private.train_on(batch)


def test_what_cannot_be_recorded_is_refused_before_anything_is_touched(tmp_path):
    with pytest.raises(ConfigurationError, match="CUDA device"):
        attach(examples(), "dp-sgd", cuda_graph=True, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match="CUDA device"):
        Trainer(
            model(), "cross-entropy", cuda_graph=True, noise_multiplier=1.0,
            sample_rate=0.5, steps=1, expected_batch_size=20,
        ).fit(TensorDataset(*examples().tensors))  # fmt: skip


class Recorder:
    """Stands for ``record``, and may refuse."""

    def __init__(self, monkeypatch, *, refuses=False):
        self.pools = []
        self.refuses = refuses
        handles = iter(range(100))
        monkeypatch.setattr("curvedp.train.graph.record", self)
        monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: next(handles))

    def __call__(self, work, device, pool=None):
        self.pools.append(pool)
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        return work


def test_graphs_that_follow_each_other_share_memory(monkeypatch):
    recorder = Recorder(monkeypatch)
    capture, other = CudaCapture(), CudaCapture()
    for value in (1, 2, 3):
        assert capture(lambda value=value: value, "cuda")() == value
    other(lambda: 4, "cuda")
    assert recorder.pools == [0, 0, 0, 1]


def test_a_step_that_needs_the_cpu_says_so(monkeypatch):
    Recorder(monkeypatch, refuses=True)
    private = attach(examples(), "dp-sgd")
    private._passed = private._engine.graphed(LOSS)
    with pytest.raises(ConfigurationError, match="leave cuda_graph out"):
        train(private)
    assert private.step == 0
