"""Code of the user's that fails on private records: who it was is said, and where."""

import ast
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import curvedp
from curvedp import Trainer
from curvedp.auditing.canaries import synthetic_canaries
from curvedp.curvature import Estimate, probe_pass
from curvedp.data import check_labels, load
from curvedp.data.source import ArrayDataset
from curvedp.errors import DataError, UserCodeError, withheld
from curvedp.experiments.inputs import read_inputs
from curvedp.experiments.predictions import predict_inputs
from curvedp.layers import Batch, cover, synthesiser_like
from curvedp.probes import OracleProbe, OwnLabels
from curvedp.train import evaluate
from curvedp.train.losses import cross_entropy
from tests.faults.cases import attach, linear, train
from tests.federated.worlds import World
from tests.hostile.listening import NUMBER, TEXT, assert_silent, said

pytestmark = pytest.mark.hostile

SOURCE = Path(curvedp.__file__).parent


def fail(private):
    """As much of a record as an error can carry, the frames of a first one included."""
    try:
        float(f"{TEXT} {private}")
    except ValueError as first:
        first.add_note(f"{private}")
        raise KeyError(f"bad {private}", TEXT) from first


def fail_if_large(x):
    if bool(((x.abs() > 1e6) & (x.abs() < 1e12)).any()):  # synthetic ones are not
        fail(x)


class Rows(Dataset):
    """Rows with the marker in them; some call fails, from a row on."""

    def __init__(self, call="", first=1):
        self.x = torch.full((8, 4), NUMBER)
        self.call, self.first = call, first

    def __len__(self):
        return fail(NUMBER) if self.call == "len" else len(self.x)

    def __getitem__(self, row):
        if self.call == "getitem" and row >= self.first:
            fail(self.x[row])
        if self.call == "ours" and row >= self.first:
            check_labels(ArrayDataset(self.x, torch.full((8,), 9)), 2)
        return self.x[row], int(NUMBER) if self.call == "label" else int(row) % 3

    def __getattr__(self, name):
        if name == "__getitems__" and self.__dict__["call"] == "getitems":
            return lambda rows: fail(self.x[rows])
        raise AttributeError(name)


class Failing(nn.Module):
    """A linear net whose pass fails on the marker; it may be the second pass."""

    def __init__(self, features=4, classes=3):
        super().__init__()
        self.inner = nn.Linear(features, classes)

    def forward(self, x):
        fail_if_large(x)
        return self.inner(x)


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, at):
        ctx.save_for_backward(at)
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        fail_if_large(ctx.saved_tensors[0])
        return d, None


class FailingBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return _FailingBackward.apply(self.inner(x), x)


ARMED = []


class FailingAgain(nn.Module):
    """Has no rule for its parameter, so it is run once more to clip."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(3, 4))

    def forward(self, x):
        if ARMED:
            fail(NUMBER)
        return x @ self.weight.T.exp()


def again():
    private = attach(Rows(), FailingAgain())
    for x, y in private.loader:
        loss = private.loss(private.model(x), y)
        loss.backward()
        ARMED.append(1)
        try:
            private.optimizer.step()
        finally:
            ARMED.clear()


def collate(rows):
    if any(x.abs().max() > 1e6 for x, _ in rows):  # made-up records are not
        fail(rows)
    return torch.utils.data.default_collate(rows)


def with_workers(count, dataset=None, **options):
    workers = {"num_workers": count, **options.pop("loader", {})}
    return train(attach(dataset or Rows(), rate=1.0, loader_options=workers, **options))


def initialise(_):
    fail(NUMBER)


class Slow(Rows):
    def __getitem__(self, row):
        if torch.utils.data.get_worker_info():
            torch.multiprocessing.Event().wait(0.5)
        return super().__getitem__(row)


def failing_loss(output, targets):
    if len(output) == 8 and output.abs().max() > 1e6:
        fail(output)
    return cross_entropy(output, targets)


def out_of_bounds():
    private = attach(Rows("label"), rate=1.0)
    for x, y in private.loader:
        private.loss(private.model(x), y)


def oracle(dataset, model):
    example = Batch(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))
    covered = cover(model, synthesiser_like(example, model), cross_entropy).covered
    how = Estimate(OracleProbe(dataset), OwnLabels(), 4, 1)
    probe_pass(model, covered, how, cross_entropy, torch.Generator().manual_seed(0))


def client():
    world = World(client={"physical_batch_size": 8})
    world.data[0].tensors[0].fill_(NUMBER)
    shared = world.clients[0].shared
    shared.model[0].register_forward_pre_hook(lambda _, given: fail_if_large(given[0]))
    world.clients[0].answer(world.server.open_round())


class Unhashable:
    def __hash__(self):
        return fail(NUMBER)


def trainer(model, recipe="dp-sgd"):
    settings = {"sample_rate": 1.0, "steps": 2, "expected_batch_size": 8}
    if recipe == "dp-sgd":
        settings["noise_multiplier"] = 1.0
    return Trainer(model, "cross-entropy", recipe, **settings).fit(Rows())


def reader(path):
    def broken(path):
        fail(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(curvedp.data.FORMATS, "npz", broken)
        (path / "x.npz").write_bytes(b"")
        load(path / "x.npz")


#: By who failed, as the message says; calls that make it fail.
SEAMS = {
    "the dataset": [
        lambda _: attach(Rows("getitem", 0)),
        lambda _: with_workers(0, Rows("getitem")),
        lambda _: with_workers(2, Rows("getitem")),
        lambda _: with_workers(0, Rows("getitems")),
        lambda _: synthetic_canaries(
            SimpleNamespace(
                collate=None, dataset=Rows("getitem", 0),
                template=lambda *_, **__: Batch(torch.zeros(1, 4), torch.zeros(1)),
            ), linear(), 2, torch.Generator(),
        ),
    ],
    "len(dataset)": [
        lambda _: attach(Rows("len")),
        lambda _: client_of(Rows("len")),
    ],
    "collate_fn": [
        lambda _: with_workers(0, collate_fn=collate),
        lambda _: with_workers(2, collate_fn=collate),
    ],
    "worker_init_fn": [
        lambda _: with_workers(1, loader={"worker_init_fn": initialise})
    ],
    "the DataLoader": [lambda _: with_workers(1, Slow(), loader={"timeout": 0.05})],
    "people": [
        lambda _: attach(Rows(), people=[Unhashable()] * 8, examples_per_person=2)
    ],
    "augment": [lambda _: train(attach(Rows(), augment=lambda x, _: fail(x)))],
    "prepare=": [
        lambda _: train(attach(Rows(), prepare=lambda b: fail_if_large(b[0]) or b))
    ],
    "private.model": [
        lambda _: train(attach(Rows(), Failing())),
        lambda _: attach(Rows(), Failing()).model.eval()(Rows().x),
        lambda _: trainer(Failing()),
    ],
    "private.loss": [
        lambda _: train(attach(Rows(), loss=failing_loss, rate=1.0)),
        lambda _: out_of_bounds(),
    ],
    "the backward pass": [lambda _: trainer(FailingBackward())],
    "private.optimizer.step()": [lambda _: again()],
    "the model or its loss": [
        lambda _: trainer(Failing(), "non-private"),
        lambda _: client(),
    ],
    "the model or the data that it is judged on": [
        lambda _: evaluate(Failing(), Rows(), cross_entropy),
        lambda _: evaluate(linear(), Rows("getitem"), cross_entropy),
    ],
    "the loss or a metric": [
        lambda _: evaluate(linear(), Rows(), failing_loss, ("loss",)),
    ],
    "the model": [
        lambda _: predict_inputs(SimpleNamespace(model=Failing()), Rows().x),
    ],
    "reading the inputs": [
        lambda _: read_inputs(SimpleNamespace(config=Rows("len")), None),
    ],
    "reading ": [reader],
    "the oracle's dataset": [lambda _: oracle(Rows("getitem"), linear())],
    "the model, on the oracle's examples": [lambda _: oracle(Rows(), Failing())],
}  # fmt: skip


def client_of(dataset):
    world = World()
    world.data[0] = dataset
    world.client(0)


CASES = [(what, call) for what, calls in SEAMS.items() for call in calls]


@pytest.mark.parametrize(("what", "call"), CASES, ids=lambda x: str(x)[:20])
def test_only_type_and_place_are_told(tmp_path, capfd, what, call):
    text, error = said(lambda: call(tmp_path), capfd)
    assert_silent(text)
    assert isinstance(error, UserCodeError), repr(error)
    assert error.problem.startswith(f"{what}" if what[-1] == " " else f"{what} raised ")
    assert error.__cause__ is None and error.__context__ is None
    if "KeyError" in error.problem:
        assert f"{__file__}, line" in error.problem and "in fail" in error.problem
    else:
        assert any(t in error.problem for t in ("IndexError", "Runtime", "Attribute"))


def test_every_seam_is_in_the_list():
    found = set()
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    for text in (t for t in texts if "withheld(" in t):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "withheld":
                first = node.args[0]
                if isinstance(first, ast.JoinedStr):
                    first = first.values[0]
                if isinstance(first, ast.Constant):
                    found.add(first.value)
    assert found | {"worker_init_fn"} == set(SEAMS)


def test_the_text_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("CURVEDP_DEBUG", "1")
    with pytest.raises(UserCodeError) as caught:
        train(attach(Rows(), Failing()))
    assert "9.8765e+08" in str(caught.value.__cause__)
    assert TEXT in str(caught.value.__cause__.__cause__)


@pytest.mark.parametrize(
    "error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit]
)
def test_what_a_caller_goes_by_keeps_its_type(capfd, error):
    def call():
        with withheld("the model"):
            try:
                fail(NUMBER)
            except KeyError:
                raise error(TEXT) from None

    text, found = said(call, capfd)
    assert_silent(text)
    assert type(found) is error and found.__context__ is None


def test_how_much_memory_there_was_not_is_told():
    said_by_torch = "CUDA out of memory. Tried to allocate 2.00 GiB."
    with (
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"),
        withheld("it"),
    ):
        raise torch.OutOfMemoryError(said_by_torch)


class OutOfMemory(Rows):
    def __getitem__(self, row):
        if row:
            raise MemoryError(TEXT)
        return super().__getitem__(row)


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_that_ends_in_a_dataset_tells_no_record(capfd, workers):
    text, error = said(lambda: with_workers(workers, OutOfMemory()), capfd)
    assert_silent(text)
    assert type(error) is MemoryError and not str(error)


def test_a_key_made_of_a_records_text_is_not_quoted(capfd):
    def keyed(rows):
        batch = torch.utils.data.default_collate(rows)
        key = TEXT if any(x.abs().max() > 1e6 for x, _ in rows) else "input"
        return {key: batch[0]}, batch[1]

    text, error = said(lambda: with_workers(0, collate_fn=keyed), capfd)
    assert_silent(text)
    assert isinstance(error, DataError) and "(number 1 of the batch)" in error.problem


def test_an_error_of_ours_passes_as_it_is(capfd):
    for workers in (0, 2):
        text, error = said(lambda n=workers: with_workers(n, Rows("ours")), capfd)
        assert_silent(text)
        assert isinstance(error, DataError) and "Traceback" not in error.problem
        assert "lies outside 0..1" in error.problem and "declare" in error.advice


def test_an_error_that_only_looks_like_ours_does_not(capfd):
    def call():
        with withheld("the dataset"):
            raise DataError(f"bad {NUMBER}")

    text, error = said(call, capfd)
    assert_silent(text)
    assert isinstance(error, UserCodeError) and "DataError" in error.problem


class Warns(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        if x.abs().max() > 1e6:
            warnings.warn(f"bad {x}", stacklevel=1)
        return self.inner(x)


def test_a_warning_tells_its_place_alone(capfd):
    text, error = said(lambda: train(attach(Rows(), Warns())), capfd)
    assert error is None and "private.model warns" in text
    assert_silent(text)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.warn("a text of the loop's own", stacklevel=1)
    assert "of the loop's own" in str(warned[0].message)


def test_a_worker_finds_the_dataset_that_was_given():
    seen = torch.zeros(3).share_memory_()

    def look(_):
        dataset = torch.utils.data.get_worker_info().dataset
        dataset.opened = True
        seen[0] = isinstance(dataset, Rows)
        seen[1] = dataset.opened and dataset.first

    with_workers(1, loader={"worker_init_fn": look})
    assert seen.tolist() == [1.0, 1.0, 0.0] and "CURVEDP_DEBUG" not in os.environ
