"""What is drawn, what is read off private records, and what is written about them."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from curvedp import Trainer
from curvedp.data import load
from curvedp.errors import ConfigurationError, DataError, LoopError
from curvedp.train import CsvLog

from .cases import attach, examples, linear, parameters, train
from .checking import refused, working

# -- sampling -------------------------------------------------------------------------


def _inclusion(private, steps, size):
    drawn = torch.zeros(steps, size)
    for batch in private._engine._loader.steps(0, steps):
        drawn[batch.step, batch.data[0][batch.present, 0].long()] += 1
    return drawn


def draws_are_poisson_as_accounted(**options):
    """Also from a DataLoader that shuffles: each on its own, at the accounted rate."""
    steps, size = 400, 40
    numbers = TensorDataset(
        torch.arange(size)[:, None].float(), torch.zeros(size).long()
    )
    private = attach(
        DataLoader(numbers, batch_size=20, shuffle=True),
        linear(features=1),
        steps=steps,
        physical_batch_size=size,
        **options,
    )
    rate = private.plan.step_event().sample_rate
    drawn = _inclusion(private, steps, size)
    assert drawn.max() == 1, "an example was drawn twice in a step"
    assert abs(drawn.mean() - rate) < 0.02, "the accounted rate is another one"
    spread = drawn.sum(1).var() / (size * rate * (1 - rate))
    assert 0.7 < spread < 1.4, f"batch sizes vary {spread:.2f} times as Poisson's do"
    again = (drawn[1:] * drawn[:-1]).mean() / rate**2
    assert 0.95 < again < 1.05, f"who was drawn comes back {again:.2f} times as often"


def secure_draws_are_poisson_as_accounted():
    draws_are_poisson_as_accounted(secure=True, unsafe_reproducible_noise=None)


def other_samplers_are_refused():
    data = examples()
    weighted = WeightedRandomSampler([1.0] * len(data), num_samples=4)
    shared = DistributedSampler(data, num_replicas=2, rank=0)
    for loader in (
        DataLoader(data, sampler=weighted, batch_size=4),
        DataLoader(data, sampler=shared, batch_size=4),
        DataLoader(data, batch_sampler=_Largest(SequentialSampler(data), 4, False)),
    ):
        refused(
            ConfigurationError, "needs Poisson", lambda loader=loader: attach(loader)
        )


class _Largest(BatchSampler):
    """Somebody's own batches."""


def sampling_options_are_refused():
    for name, value in (("shuffle", True), ("drop_last", True), ("batch_size", 4)):
        refused(
            ConfigurationError,
            "the plan says what is",
            partial(attach, examples(), loader_options={name: value}),
        )


def batches_of_another_loader_are_refused():
    private = attach(examples())

    def loop():
        for x, y in DataLoader(examples(), batch_size=8, shuffle=True):
            private.loss(private.model(x), y).backward()
            private.optimizer.step()

    refused(LoopError, "without a batch from private.loader", loop)


def empty_batches_count_with_a_collate_function():
    def collate(items):  # crashes on an empty list, as most of them do
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    private = attach(
        DataLoader(examples(), batch_size=4, collate_fn=collate),
        rate=1e-9,
        steps=3,
        delta=1e-12,
    )
    before = parameters(private.model)
    with working():
        after = train(private)
    assert private.step == private._engine.ledger.count() == 3, "a draw was skipped"
    assert (before != after).all(), "an empty draw got no noise"


# -- several processes ----------------------------------------------------------------


@contextmanager
def _one_of_two_processes():
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def several_processes_are_refused():
    with _one_of_two_processes():
        refused(ConfigurationError, "2 processes", lambda: attach(examples()))


def processes_started_later_are_refused():
    private = attach(examples())
    with _one_of_two_processes():
        refused(ConfigurationError, "2 processes", lambda: train(private))


# -- preprocessing --------------------------------------------------------------------

_COLUMNS = {
    "age": {"low": 0, "high": 100},
    "word": {"categories": ["aye", "nay"]},
}


def _table(rows, **declared):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "people.csv"
        path.write_text("age,word,label\n" + "".join(f"{row}\n" for row in rows))
        settings = {"target": "label", "classes": ["no", "yes"], "columns": _COLUMNS}
        return load(path, **{**settings, **declared})


def nothing_is_fitted_on_records():
    rows = ["20,aye,no", "40,nay,yes", "60,aye,no"]
    alone, among = _table(rows), _table([*rows, "99,secret,yes"])
    assert alone.input_shape == among.input_shape, "one record added a column"
    given, expected = among.train.inputs[:3], alone.train.inputs
    assert torch.equal(given, expected), "one record changed what others look like"


def undeclared_vocabulary_is_refused():
    rows = ["20,aye,no", "40,nay,yes"]
    for undeclared, words in (
        ({"columns": {}}, "declares no input columns"),
        ({"classes": None}, "nothing is declared about the target"),
    ):
        refused(DataError, words, partial(_table, rows, **undeclared))


def preprocessing_is_said_not_to_be_covered():
    text = str(attach(examples()).statement())
    assert "a vocabulary" in text.partition("Not covered:")[2]


def attaching_sees_no_value():
    seen = []
    model = linear()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().max()))

    def collate(items):
        seen.extend(x.abs().max() for x, _ in items)
        return default_collate(items)

    x, y = examples().tensors
    private = attach(TensorDataset(1e6 + x, y), model, collate_fn=collate)
    told = [float(x) for x in seen if 1e5 < float(x) < 1e9]  # not finite is synthetic
    assert not told, "the check at attach time ran on private values"
    empty = private._engine._loader._empty
    assert not any(bool(t.any()) for t in empty), "padding holds a private example"


# -- files ----------------------------------------------------------------------------


def loss_is_in_no_file():
    """Also when it is shown on the screen on request."""
    losses = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        Trainer(
            linear(),
            "cross-entropy",
            noise_multiplier=1.0,
            sample_rate=0.5,
            steps=3,
            expected_batch_size=10,
            run_dir=folder / "run",
            checkpoint_every=1,
            show_private_training_loss=True,
            on_progress=[
                lambda p: losses.append(p.private_loss),
                CsvLog(folder / "log.csv"),
            ],
        ).fit(examples())
        written = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    assert len(losses) == 3 and written
    for loss in losses:
        for spelling in (str(loss)[:8].encode(), struct.pack("<f", loss)):
            assert not any(spelling in text for text in written), "a loss was saved"
