"""What a private pass writes into the model does not get past the noise.

Each net keeps the mean of the rows that it has seen, somewhere. With noise of 50 times
the bound, a model that holds that mean after a step holds the data.
"""

from __future__ import annotations

import array
import copy
import functools
import io
import sys
import warnings
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer, make_private
from curvedp.errors import (
    CouplingError,
    CoverageError,
    CurvedpError,
    LedgerError,
    LoopError,
    UserCodeError,
)
from curvedp.layers import contents
from curvedp.layers import held as holding
from curvedp.layers.coverage import undisturbed
from curvedp.layers.state import State
from curvedp.testing.neighbours import _Told

from ..faults.cases import attach, examples, train
from ..faults.state_checks import STILL, as_on_a_gpu

ROWS, FEATURES = 24, 4
#: Nothing that training releases at this noise is near it.
MARK = 1000.0


def rows():
    """Rows whose mean is told from everything else."""
    data = examples(ROWS, FEATURES)
    return TensorDataset(data.tensors[0] + MARK, data.tensors[1])


@dataclass
class Holder:
    """No module, and held by one."""

    last: object = None
    seen: list = field(default_factory=list)


def compressed(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch may change them
        size = ((2, 2),) if layout == "_bsr" else ()
        return getattr(torch.eye(FEATURES), f"to_sparse{layout}")(*size)


class Key:
    """A key of a dictionary, with attributes."""


class Slotted:
    __slots__ = ("last",)

    def __init__(self):
        self.last = None


class Row(tuple):
    """May have attributes."""


class Raw(bytearray):
    """Has a dictionary, and bytes besides."""


class Numbers(array.array):
    """Likewise."""


class Meter(Holder):
    """Of a module whose name merely begins like one that is left alone."""


Meter.__module__ = "logging_utils"
sys.modules["logging_utils"] = SimpleNamespace(Meter=Meter)


def objects(value=None):
    made = np.empty(1, dtype=object)
    made[0] = value
    return made


class Keeps(nn.Module):
    """Keeps what it has seen from the moment it is told to, so after attaching."""

    def __init__(self, write, **held):
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, 3)
        self.register_buffer("seen", torch.zeros(FEATURES))
        self.register_buffer("hidden", torch.zeros(FEATURES), persistent=False)
        self.code = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)
        for name, value in held.items():
            if name == "sparse":
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.write, self.told = write, False

    def forward(self, x):
        if self.told:
            self.write(self, x.detach().mean(0))
        return self.head(self.norm(x))


class Speaks(Keeps):
    """Gives what it has seen as its extra state, from where nobody looks."""

    out_of_sight: dict = {"last": torch.zeros(FEATURES)}  # noqa: RUF012

    def get_extra_state(self):
        return self.out_of_sight["last"].clone()

    def set_extra_state(self, state):
        self.out_of_sight["last"] = state


def by_data(m, mean):
    m.seen.data.copy_(mean)


def by_numpy(m, mean):
    m.seen.numpy()[:] = mean.numpy()


def by_binding_data(m, mean):
    m.seen.data = mean


def hidden_buffer(m, mean):
    m.hidden.data.copy_(mean)


def new_buffer(m, mean):
    m.register_buffer("late", mean)


def codebook(m, mean):
    m.code.data.lerp_(mean, 0.5)


def codebook_bound_anew(m, mean):
    m.code = nn.Parameter(mean, requires_grad=False)


def trained_weight(m, mean):
    m.head.weight.data[0] = mean


def trained_weight_by_numpy(m, mean):
    m.norm.weight.detach().numpy()[:] = mean.numpy()


def attribute(m, mean):
    m.last = mean


def number(m, mean):
    m.last = mean[0].item()


def on_a_submodule(m, mean):
    m.head.last = mean


def on_a_weight(m, mean):
    m.code.last = mean


def appended(m, mean):
    m.log.append(mean[0].item())


def queued(m, mean):
    m.queue.append(mean)


def in_a_set(m, mean):
    m.members.add(mean[0].item())


def in_a_dict(m, mean):
    m.table["last"] = mean


def nested(m, mean):
    m.nest["a"][0]["b"][1].append(mean)


def in_an_array(m, mean):
    m.array[:] = mean.numpy()


def in_bytes(m, mean):
    m.raw[:] = mean.numpy().tobytes()


def in_an_object_array(m, mean):
    m.objects[0] = mean


def within_an_object_array(m, mean):
    m.objects[0].data.copy_(mean)


def on_a_tuple(m, mean):
    m.row.last = mean


def on_a_partial(m, mean):
    m.call.last = mean


def in_a_partials_function(m, mean):
    m.call.func.__self__.last = mean


def in_a_file(m, mean):
    m.file.seek(0)
    m.file.write(mean.numpy().tobytes())


def in_a_text(m, mean):
    m.text.write(str(mean))


def in_bytes_of_a_kind(m, mean):
    m.raw[:] = mean.numpy().tobytes() * 2


def in_numbers_of_a_kind(m, mean):
    m.numbers.append(float(mean[0]))


def in_an_order(m, mean):
    if mean[0] > MARK / 2:
        m.order.move_to_end("a")


def in_a_meter(m, mean):
    m.meter.last = mean


def on_a_key(m, mean):
    next(iter(m.table)).last = mean


def in_sparse_values(m, mean):
    m.sparse._values().copy_(mean)


def in_sparse_indices(m, mean):
    if mean[0] > MARK / 2:
        m.sparse._indices()[0, 0] = 1


def in_a_sparse_tensor(m, mean):
    m.sparse.copy_(torch.diag(mean).to_sparse())


def in_compressed_rows(m, mean):
    m.sparse.values().fill_(mean[0])


def in_a_holder(m, mean):
    m.holder.last = mean


def in_a_holders_list(m, mean):
    m.holder.seen.append(mean)


def in_a_namespace(m, mean):
    m.space.inner.last = mean


def in_a_slot(m, mean):
    m.slotted.last = mean


def as_extra_state(m, mean):
    m.out_of_sight["last"] = mean


WAYS = {
    by_data: {},
    by_numpy: {},
    by_binding_data: {},
    hidden_buffer: {},
    new_buffer: {},
    codebook: {},
    codebook_bound_anew: {},
    trained_weight: {},
    trained_weight_by_numpy: {},
    attribute: {},
    number: {},
    on_a_submodule: {},
    on_a_weight: {},
    appended: {"log": []},
    queued: {"queue": deque(maxlen=3)},
    in_a_set: {"members": set()},
    in_a_dict: {"table": {}},
    nested: {"nest": {"a": ([{"b": (0, [])}],)[0]}},
    in_an_array: {"array": np.zeros(FEATURES, np.float32)},
    in_bytes: {"raw": bytearray(4 * FEATURES)},
    in_an_object_array: {"objects": objects()},
    within_an_object_array: {"objects": objects(torch.zeros(FEATURES))},
    on_a_tuple: {"row": Row((1,))},
    on_a_partial: {"call": functools.partial(len)},
    in_a_partials_function: {"call": functools.partial(Holder().__eq__)},
    in_a_file: {"file": io.BytesIO(b"long enough to be written over in part")},
    in_a_text: {"text": io.StringIO("a\r\nb")},
    in_bytes_of_a_kind: {"raw": Raw(4 * FEATURES)},
    in_numbers_of_a_kind: {"numbers": Numbers("f", [0.0])},
    in_an_order: {"order": OrderedDict(a=1, b=2)},
    in_a_meter: {"meter": Meter()},
    on_a_key: {"table": {Key(): 1}},
    in_sparse_values: {"sparse": torch.eye(FEATURES).to_sparse()},
    in_sparse_indices: {"sparse": torch.eye(FEATURES).to_sparse()},
    in_a_sparse_tensor: {"sparse": torch.eye(FEATURES).to_sparse()},
    in_a_holder: {"holder": Holder()},
    in_a_holders_list: {"holder": Holder()},
    in_a_namespace: {"space": SimpleNamespace(inner=SimpleNamespace())},
    in_a_slot: {"slotted": Slotted()},
    as_extra_state: {},
}
WEIGHTS = {codebook, trained_weight, trained_weight_by_numpy}


def keeps(write):
    kind = Speaks if write is as_extra_state else Keeps
    return kind(write, **copy.deepcopy(WAYS[write]))


def pickled(model):
    """All that leaves with the model: ``torch.save``, without the attack itself."""
    told, write = model.told, model.write
    model.told, model.write = False, None
    try:
        file = io.BytesIO()
        torch.save(model, file)
        return file.getvalue(), {k: str(v) for k, v in model.state_dict().items()}
    finally:
        model.told, model.write = told, write


def private_of(model, **options):
    frozen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(frozen, lr=0.1)
    given = {"noise_multiplier": 50.0, "optimizer": optimizer, **options}
    return attach(rows(), model, **given)


def by_loop(private):
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()


def by_train_on(private):
    for batch in private.loader:
        private.train_on(batch)


@pytest.mark.parametrize("loop", [by_loop, by_train_on])
@pytest.mark.parametrize("write", WAYS, ids=lambda w: w.__name__)
def test_what_a_forward_pass_writes_is_put_back_and_refused(write, loop):
    model = keeps(write)
    private = private_of(model)
    before = pickled(model)
    model.told = True
    with pytest.raises(CouplingError, match="past the noise"):
        loop(private)
    assert pickled(model) == before
    assert private._engine.ledger.count() == 0
    if write in WEIGHTS:
        model.told = False
        with pytest.raises(LoopError, match="closed"):
            loop(private)


@pytest.mark.parametrize("loop", [by_loop, by_train_on])
@pytest.mark.parametrize("write", WEIGHTS, ids=lambda w: w.__name__)
def test_on_a_gpu_the_answer_comes_before_the_payment(write, loop, monkeypatch):
    monkeypatch.setattr(contents._Copied, "differs", as_on_a_gpu)
    monkeypatch.setattr(State, "_still", STILL, raising=False)
    late, settle = [], State.settle

    def noted(state, written):
        late.append(written)
        settle(state, written)

    monkeypatch.setattr(State, "settle", noted)
    model = keeps(write)
    private = private_of(model)
    before = pickled(model)
    model.told = True
    with pytest.raises(CouplingError, match="past the noise"):
        loop(private)
    assert late == [True]
    assert pickled(model) == before
    assert private._engine.ledger.count() == 0


@pytest.mark.parametrize("write", [by_data, codebook, attribute, as_extra_state])
def test_the_trainer_puts_it_back_too(write, tmp_path):
    model = keeps(write)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = Trainer(
        model,
        "cross-entropy",
        noise_multiplier=50.0,
        sample_rate=0.5,
        steps=3,
        expected_batch_size=12,
        run_dir=tmp_path,
        on_progress=lambda _: setattr(model, "told", True),
    )
    with pytest.raises(CouplingError, match="past the noise"):
        trainer.fit(rows())
    for name in ("seen", "code"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert not hasattr(model, "last")


class Backwards(torch.autograd.Function):
    """Writes what comes back into a buffer."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        if ctx.model.told:
            ctx.model.seen.data.copy_(d.mean(0))
        return d, None


def by_function(m, h):
    return Backwards.apply(h, m)


def by_tensor_hook(m, h):
    def keep(d):
        if m.told:
            m.last = d.mean(0)

    if h.requires_grad:
        h.register_hook(keep)
    return h


@pytest.mark.parametrize("write", [by_function, by_tensor_hook])
def test_what_a_backward_pass_writes_is_put_back_and_refused(write):
    class Net(Keeps):
        def forward(self, x):
            return self.head(write(self, self.norm(x)))

    model = Net(None)
    private = private_of(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.told = True
    with pytest.raises(CouplingError, match="past the noise"):
        by_loop(private)
    assert torch.equal(model.seen, before["seen"])
    assert not hasattr(model, "last")


def test_a_state_dict_in_the_middle_of_a_pass_is_looked_at():
    class Net(Keeps):
        def forward(self, x):
            return self.head(by_function(self, self.norm(x)))

    model = Net(None)
    private = private_of(model)
    model.told = True
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        with pytest.raises(CouplingError, match="'seen'"):
            private.model.state_dict()
        break
    assert not model.seen.any()


def test_a_pass_without_gradients_over_an_open_batch_is_looked_at():
    model = keeps(by_data)
    private = private_of(model)
    model.told = True
    with torch.no_grad():
        private.model(torch.ones(2, FEATURES))  # between batches: the user's own
    assert model.seen.eq(1).all()
    for x, _ in private.loader:
        with torch.no_grad(), pytest.raises(CouplingError, match="'seen'"):
            private.model(x)
        assert model.seen.eq(1).all()
        break


def test_a_pass_that_is_given_up_leaves_nothing():
    class Net(Keeps):
        def forward(self, x):
            self.kept = x.mean()
            return self.head(by_function(self, self.norm(x)))

    model = Net(None)
    private = private_of(model)
    for x, _ in private.loader:
        private.model(x)
        assert float(model.kept) > MARK / 2
        break
    assert not hasattr(model, "kept")


class Fails(Keeps):
    def forward(self, x):
        output = super().forward(x)
        if self.told:
            raise KeyError("a fault of the model's own")
        return output


def test_a_pass_that_fails_leaves_nothing():
    for write in (by_data, codebook, attribute):
        model = Fails(write)
        private = private_of(model)
        before = pickled(model)
        model.told = True
        batches = iter(private.loader)
        x, _ = next(batches)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), pytest.raises(UserCodeError):
                private.model(x)
            assert pickled(model) == before
            if write is codebook:
                break  # the run is closed


def test_what_goes_on_from_what_it_saw_is_refused_when_attached():
    def running(m, mean):
        m.mean = 0.9 * m.mean + 0.1 * mean

    for write, held in (
        (running, {"mean": torch.zeros(FEATURES)}),
        (by_data, {}),
        (codebook, {}),
        (appended, {"log": []}),
    ):
        model = Keeps(write, **held)
        model.told = True
        before = pickled(model)
        with pytest.raises(CouplingError, match="past the noise"):
            private_of(model)
        assert pickled(model) == before


def test_large_weights_come_back_from_the_checkpoint_or_not_at_all(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(contents, "COPIED", 0)
    for stored in (True, False):
        model = keeps(codebook)
        private = private_of(model, run_dir=tmp_path / str(stored))
        if stored:
            private.save()
        model.told = True
        with pytest.raises(CouplingError, match="'code'"):
            by_loop(private)
        assert torch.equal(model.code, torch.zeros(FEATURES)) is stored
        assert bool(model.code.isnan().all()) is not stored
        assert not bool(model.head.weight.isnan().any())
        with pytest.raises(LedgerError):
            private.save()


def test_extra_state_that_is_no_tensor_is_stored_and_comes_back(tmp_path):
    class Remembers(Keeps):
        note = ("public", 1.5)

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    def made():
        return private_of(Remembers(None), run_dir=tmp_path)

    with made() as private:
        private._engine.model.note = ("mine", 2.0)
        private.save()
    with made() as private:
        private.resume()
        assert private._engine.model.note == ("mine", 2.0)


def test_extra_state_that_cannot_be_stored_is_refused_when_attached(tmp_path):
    class Remembers(Keeps):
        def get_extra_state(self):
            return {"note": {1, 2}}

        def set_extra_state(self, state):
            pass

    with pytest.raises(CurvedpError, match="set in the state"):
        private_of(Remembers(None), run_dir=tmp_path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_watched_is_refused_by_name(monkeypatch):
    lists = Keeps(None, nest=[[k] for k in range(40)])
    monkeypatch.setattr(holding, "MOST", 30)
    for model, words in (
        (lists, "more than 30 Python containers"),
        (Keeps(None, head=nn.LazyLinear(3)), "has no shape yet"),
        (Keeps(None, bag=torch.nested.nested_tensor([torch.ones(2)])), "'bag'"),
    ):
        with pytest.raises(CoverageError, match=words):
            State(model).open()
        with pytest.raises(CoverageError, match=words), undisturbed(model):
            pass


@pytest.mark.parametrize("layout", ["", "_csr", "_bsr"])
def test_a_sparse_buffer_of_the_models_trains(layout):
    eye = torch.eye(FEATURES)
    write = in_sparse_values if layout == "" else in_compressed_rows
    model = Keeps(write, sparse=compressed(layout))
    train(private_of(model))
    private = private_of(model)
    model.told = True
    with pytest.raises(CouplingError, match="'sparse'"):
        by_loop(private)
    assert torch.equal(model.sparse.to_dense(), eye)


def test_a_bit_is_seen_wherever_it_is():
    torch.manual_seed(0)
    for dtype, size in ((torch.float32, 40_000), (torch.bfloat16, 7), (torch.int8, 5)):
        x = torch.zeros(size).to(dtype)
        for copied in (2**26, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(contents, "COPIED", copied)
                held = contents.Contents([x])
            held.hold()
            assert held.changed() == []
            x.view(torch.uint8)[-1] ^= 1
            assert held.changed() == [0]
            assert held.restore(0) is bool(copied)
            x.zero_()


def test_make_private_leaves_the_model_as_it_was():
    model = keeps(attribute)
    model.told = True  # written anew by every pass: found, and gone again
    private = make_private(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
        rows(),
        loss="cross-entropy",
        noise_multiplier=50.0,
        sample_rate=0.5,
        steps=2,
        expected_batch_size=12,
        physical_batch_size=8,
    )
    assert not hasattr(model, "last")
    train(private)
    assert not hasattr(model, "last")


class Counts(nn.Module):
    """Counts its calls, and those in which all is in order, in three places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.utils.spectral_norm(nn.Linear(FEATURES, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("good", torch.zeros((), dtype=torch.long))
        self.number, self.table = 0, None

    def forward(self, x):
        self.calls += 1
        if bool(torch.isfinite(x).all()):
            self.good += 1
            self.number += 1
            self.table = self.table or {"rows": len(x)}
        return self.head(x)


def counted(present, value=0.0):
    """What a model holds after a step over these records, of which 3 has a value."""
    data = examples(ROWS, FEATURES)
    data.tensors[0][3] = value
    model = Counts()
    private = attach(data, model, noise_multiplier=50.0, steps=1)
    before = model.state_dict()["head.weight_u"].clone()
    with pytest.MonkeyPatch.context() as patch:
        own = private._engine._loader
        told = _Told(own._sampler, list(range(present)))
        patch.setattr(own, "_sampler", told)
        train(private)
    held = model.state_dict()
    assert not torch.equal(held["head.weight_u"], before)
    numbers = int(held["calls"]), int(held["good"]), model.number, model.table
    return *numbers, held["head.weight_u"].tolist()


def test_counters_and_caches_move_once_a_step_however_many_its_portions():
    one = counted(8)
    assert one[:4] == (1, 1, 1, {"rows": 8})
    assert counted(9) == counted(24) == counted(0) == one


def test_a_counter_that_stands_still_tells_of_no_record():
    bad = float("nan")
    assert counted(8, bad) == counted(24, bad) == counted(8)
