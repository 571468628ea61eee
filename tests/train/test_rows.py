"""Rows of a hand-written loop: model and loss get the loader's, in its order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer, make_private
from curvedp.errors import ConfigurationError, DataError, LoopError
from curvedp.train import rows as module

PAD = 0


def rows(count=24, *shape, high=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if high is None:
        return torch.randn(count, *shape, generator=generator)
    return torch.randint(0, high, (count, *shape), generator=generator)


def vectors(count=24):
    return TensorDataset(rows(count, 4), rows(count, high=3))


def attach(dataset, model, **options):
    settings = {
        "loss": "cross-entropy",
        "noise_multiplier": 1.0,
        "sample_rate": 0.5,
        "steps": 3,
        "expected_batch_size": 12,
        "physical_batch_size": 8,
        "unsafe_reproducible_noise": 1,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, dataset, **{**settings, **options})


def train(private, change=lambda batch: batch, tier="loop"):
    for batch in private.loader:
        x, y = change(tuple(batch))
        private.optimizer.zero_grad()
        if tier == "train_on":
            private.train_on((x, y))
            continue
        args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
        private.loss(private.model(*args, **kwargs), y).backward()
        private.optimizer.step()
    return private


def paid(private):
    return private._engine.ledger.count()


def refused_unpaid(private, change, tier="loop", match="private.loader gave"):
    with pytest.raises(LoopError, match=match) as caught:
        train(private, change, tier)
    assert paid(private) == 0
    return str(caught.value)


# -- what mixes rows ---------------------------------------------------------------


def in_place(x, y):
    x -= x.mean(0)
    return x, y


def past_the_version(x, y):
    x.data -= x.mean(0)
    return x, y


def through_numpy(x, y):
    x.numpy()[:] = x.numpy()[::-1].copy()
    return x, y


def one_column(x, y):
    x = x.clone()
    x[:, 2] -= x[:, 2].mean()
    return x, y


def ordered(x, y):
    order = x.norm(dim=1).argsort()
    return x[order], y[order]


MIXING = {
    "sorted together": ordered,
    "rolled": lambda x, y: (x.roll(1, 0), y),
    "flipped": lambda x, y: (x.flip(0), y.flip(0)),
    "labels alone": lambda x, y: (x, y.flip(0)),
    "mixup": lambda x, y: (0.7 * x + 0.3 * x.roll(1, 0), y),
    "centred": lambda x, y: (x - x.mean(0), y),
    "one column centred": one_column,
    "in place": in_place,
    "through .data": past_the_version,
    "through numpy": through_numpy,
    "one row for all": lambda x, y: (x[:1].expand(len(x), -1), y),
    "a row missing": lambda x, y: (x[1:], y[1:]),
    "rows twice": lambda x, y: (torch.cat([x, x]), torch.cat([y, y])),
    "across": lambda x, y: (x.reshape(2, -1, 4).transpose(0, 1).reshape(-1, 4), y),
    "other data": lambda x, y: (torch.ones_like(x), y),
}


@pytest.mark.parametrize("tier", ["loop", "train_on"])
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_were_mixed_are_refused_before_a_payment(name, tier):
    private = attach(vectors(), nn.Linear(4, 3))
    said = refused_unpaid(private, lambda batch: MIXING[name](*batch), tier)
    assert "make_private(..., prepare=lambda batch: (" in said
    with pytest.raises(LoopError):  # an error that was caught leaves nothing to release
        private.optimizer.step()
    assert paid(private) == 0


def test_large_rows_are_compared_at_places_of_every_row():
    dataset = TensorDataset(rows(40, 3, 80, 80), rows(40, high=3))
    net = nn.Sequential(nn.AvgPool2d(20), nn.Flatten(), nn.Linear(48, 3))
    passed = train(attach(dataset, net))
    assert passed.step == 3
    swapped = torch.tensor([0, 1, 2, 4, 3, 5, 6, 7])
    for change in (
        lambda b: (b[0][swapped], b[1]),
        lambda b: (b[0] - b[0].mean(0), b[1]),
    ):
        refused_unpaid(attach(dataset, net), change)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, shift=0.0):
        return self.layer(x - shift)


@dataclass(slots=True)
class Hidden:
    shift: torch.Tensor


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x.mean(0),
        lambda x: x.mean(0).expand(x.shape).contiguous(),
        lambda x: float(x.mean()),
        lambda x: x.mean(0).numpy(),
        lambda x: Hidden(x.mean(0)),
        lambda x: {"shift": [x.mean(0)]},
        lambda x: nn.utils.rnn.pack_sequence([x]),
    ],
)
def test_a_statistic_of_the_batch_beside_its_rows_is_refused(value):
    private = attach(vectors(), Shifted())
    for x, y in private.loader:
        with pytest.raises(LoopError, match="argument 2"):
            private.loss(private.model(x, value(x)), y)
        with pytest.raises(LoopError, match="shift"):
            private.loss(private.model(x, shift=value(x)), y)
        private.loss(private.model(x), y).backward()  # nothing is lost
        private.optimizer.step()
    assert private.step == 3


def test_a_later_batch_is_compared_as_the_first_is():
    private = attach(vectors(), nn.Linear(4, 3))
    made = iter([False, True])

    def change(batch):
        return ordered(*batch) if private.step and next(made, True) else batch

    with pytest.raises(LoopError, match=r"private\.model"):
        train(private, change)
    assert paid(private) == private.step >= 1


def test_the_loss_of_an_evaluation_is_not_compared():
    private = attach(vectors(), nn.Linear(4, 3))
    x, y = vectors().tensors
    for inputs, targets in private.loader:
        with torch.no_grad():
            private.loss(private.model(x), y)
        output = private.model(inputs)
        F.cross_entropy(output, targets.flip(0)).backward()
        with pytest.raises(LoopError, match=r"not come from private\.loss"):
            private.optimizer.step()
        break


def test_without_a_loss_the_statement_says_what_was_not_compared():
    private = attach(vectors(), nn.Linear(4, 3), loss=None)
    for x, y in private.loader:
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
    assert "labels were not compared" in str(private.statement())


def subtracted(output):
    output -= output.mean(0)
    return output


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out - out.mean(0),
        lambda out: out - out.mean(0).detach(),
        lambda out: out.flip(0),
        lambda out: out.log_softmax(0),
        lambda out: out.log_softmax(-2),
        lambda out: out.unsqueeze(0).log_softmax(1).squeeze(0),
        lambda out: out.reshape(2, -1, 3).transpose(0, 1).reshape(-1, 3),
        lambda out: out * out.std(),
        lambda out: out - out[:, :1].squeeze(1).log_softmax(-1)[:, None],
        lambda out: out[:, 0].softmax(-1).unsqueeze(1).expand(-1, 3),
        lambda out: out[:, 0].log_softmax(-1).sigmoid().unsqueeze(-1),
        lambda out: out[torch.arange(len(out)).flip(0)],
        subtracted,
    ],
)
def test_an_output_that_was_mixed_is_refused(change):
    private = attach(vectors(), nn.Linear(4, 3))
    for x, y in private.loader:
        output = private.model(x)
        with pytest.raises(LoopError, match=r"what private\.model gave"):
            private.loss(change(output), y).backward()
        with pytest.raises(LoopError):
            private.optimizer.step()
        break
    assert paid(private) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out.double().float(),
        lambda out: out.log_softmax(1).exp(),
        lambda out: F.softmax(out, -1).clone(),
        lambda out: out.unsqueeze(1).flatten(1).sigmoid(),
        lambda out: out.unsqueeze(1).mean(1),
        lambda out: out.unsqueeze(-1).transpose(1, 2)[:, -1],
        lambda out: out.exp().unsqueeze(2)[:, :, :1].sum(-1),
        lambda out: out.unsqueeze(1).max(1)[0],
    ],
)
def test_functions_of_an_element_shapes_or_classes_may_stand_between(change):
    private = attach(vectors(), nn.Linear(4, 3))
    for x, y in private.loader:
        private.loss(change(private.model(x)), y).backward()
        private.optimizer.step()
    assert private.step == 3


def as_on_a_gpu(x, y):
    """A comparison that is made, and whose answer nobody has waited for."""
    return torch.tensor(not torch.equal(x.nan_to_num(), y.nan_to_num()))


@pytest.mark.parametrize("change", [ordered, in_place, past_the_version])
def test_on_a_gpu_the_answer_comes_before_the_payment(change, monkeypatch):
    monkeypatch.setattr(module, "differ", as_on_a_gpu)
    late = []
    flags = module.GivenRows.flags

    def noted(self):
        late.extend(argument.where for argument, _ in self._late)
        return flags(self)

    monkeypatch.setattr(module.GivenRows, "flags", noted)
    private = attach(vectors(), nn.Linear(4, 3))
    train(private, lambda batch: (batch[0].clone(), batch[1].clone()))
    assert {"private.model", "private.loss"} <= set(late)

    private = attach(vectors(), nn.Linear(4, 3))
    honest = iter([True])

    def first_is_honest(batch):  # so that the way is known: nothing is searched for
        if next(honest, False):
            return batch[0].clone(), batch[1].clone()
        return tuple(x.clone() for x in change(*batch))

    with pytest.raises(LoopError, match=r"private\.loader gave"):
        train(private, first_is_honest)
    with pytest.raises(LoopError):
        private.optimizer.step()
    assert paid(private) == private.step <= 1


# -- ordinary loops ----------------------------------------------------------------


class Tokens(nn.Module):
    """Next tokens of ids [B, T]."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def next_token(logits, labels):
    labels = labels[:, : logits.shape[1]]
    logits = logits[:, : labels.shape[1]]
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)


class Flat(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 3)

    def forward(self, x):
        return self.layer(x.flatten(1).to(self.layer.weight.dtype))


def masked(labels):
    labels[labels == PAD] = -100
    return labels


def of_labels(change):
    return lambda batch: (batch[0], change(batch[1]))


def of_inputs(change):
    return lambda batch: (change(batch[0]), batch[1])


def ordinary():
    """Name, dataset, model, loss, the loop's line, and whether it needs prepare=."""
    y = rows(24, high=3)
    images = rows(24, 5, 6, 3, high=256).to(torch.uint8)
    ids = rows(24, 6, high=7)
    vectors_of = nn.Linear(4, 3)
    xent, lm = "cross-entropy", next_token
    scaled, constants = of_inputs(lambda x: x / 255), of_inputs(lambda x: (x - 3) / 7)
    return {
        "x / 255": (TensorDataset(images, y), Flat(90), xent, scaled, True),
        "constants": (vectors(), vectors_of, xent, constants, True),
        "one-hot": (
            vectors(),
            vectors_of,
            xent,
            of_labels(lambda y: F.one_hot(y, 3).float()),
            True,
        ),
        "labels of padding": (
            TensorDataset(ids, ids.clone()),
            Tokens(),
            lm,
            of_labels(masked),
            True,
        ),
        "next token": (
            TensorDataset(ids, ids.clone()),
            Tokens(),
            lm,
            lambda batch: (batch[0][:, :-1], batch[0][:, 1:]),
            False,
        ),
        "NHWC to NCHW": (
            TensorDataset(images, y),
            Flat(90),
            xent,
            of_inputs(lambda x: x.permute(0, 3, 1, 2)),
            False,
        ),
        "contiguous": (
            TensorDataset(images, y),
            Flat(90),
            xent,
            of_inputs(lambda x: x.permute(0, 3, 1, 2).contiguous().float()),
            False,
        ),
        "casts": (
            vectors(),
            Flat(4),
            xent,
            lambda batch: (batch[0].bfloat16(), batch[1].int().long()),
            False,
        ),
        "chosen columns": (
            vectors(),
            Flat(4),
            xent,
            of_inputs(lambda x: torch.cat([x[:, [3, 0]], x[:, 1:3]], 1)),
            False,
        ),
        "a new dimension": (
            vectors(),
            Flat(4),
            xent,
            of_inputs(lambda x: x.unsqueeze(1).clone().requires_grad_()),
            False,
        ),
    }


@pytest.mark.parametrize("name", ordinary())
def test_ordinary_lines_pass_or_are_refused_with_the_line_to_write(name):
    dataset, model, loss, line, needs_prepare = ordinary()[name]
    if needs_prepare:
        said = refused_unpaid(attach(dataset, model, loss=loss), line)
        targets = name in ("one-hot", "labels of padding")
        assert ("change(batch[1])" if targets else "change(batch[0])") in said
        private = train(attach(dataset, model, loss=loss, prepare=line))
    else:
        private = train(attach(dataset, model, loss=loss), line)
    assert private.step == 3


def test_a_large_image_in_another_layout_passes():
    dataset = TensorDataset(rows(24, 56, 56, 6).relu(), rows(24, high=3))
    for change in (
        lambda x: x.permute(0, 3, 1, 2),
        lambda x: x.permute(0, 3, 1, 2).contiguous(),
        lambda x: x.to(torch.float64).permute(0, 3, 1, 2),
    ):
        private = attach(dataset, Flat(18816))
        train(private, of_inputs(change))
        assert private.step == 3
    layouts = iter([(0, 2, 1, 3), (0, 3, 1, 2), (0, 1, 3, 2)] * 9)
    private = attach(dataset, Flat(18816))  # another way for every batch
    with pytest.raises(LoopError, match="another way"):
        train(private, of_inputs(lambda x: x.clone().permute(next(layouts))))
    assert paid(private) == private.step <= 1


def test_not_a_number_is_equal_to_itself():
    x = rows(24, 4)
    x[::2, 1] = torch.nan
    private = attach(TensorDataset(x.double(), rows(24, high=3)), Flat(4))
    train(private, of_inputs(lambda x: x.float()))
    assert private.step == 3
    private = attach(TensorDataset(x, rows(24, high=3)), nn.Linear(4, 3))
    refused_unpaid(private, lambda batch: ordered(*batch))


class Named(nn.Module):
    """Keyword arguments and a loss of its own, as models of Hugging Face have them."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids, mask, labels=None, quiet=True):
        return self.head(self.table(ids) * mask[..., None])


class Texts(TensorDataset):
    def __getitem__(self, index):
        ids, mask = super().__getitem__(index)
        return {"ids": ids, "mask": mask}, ids


def test_a_mapping_passes_by_name_and_its_line_names_the_key():
    def dataset():
        return Texts(rows(24, 6, high=7), rows(24, 6, high=2))

    private = attach(dataset(), Named(), loss=next_token)
    for x, y in private.loader:
        private.loss(private.model(**x, labels=y, quiet=False), y).backward()
        private.optimizer.step()
    assert private.step == 3
    private = attach(dataset(), Named(), loss=next_token)
    said = refused_unpaid(private, of_inputs(lambda x: x | {"mask": x["mask"] * 2}))
    assert "({**batch[0], 'mask': change(batch[0]['mask'])}, batch[1])" in said


# -- what a batch chooses ----------------------------------------------------------


class Flagged(nn.Module):
    """Of any width, with a flag."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x, flip=False, mask=None):
        x = x.sum(1, keepdim=True)
        return self.layer(-x if flip else x)


def every_other(first, later):
    """The first portion one way, later ones another."""
    calls = iter([first])

    def change(x):
        return next(calls, later)(x)

    return change


CHOSEN = {
    "trimmed": (lambda x: x, lambda x: x[:, :3]),
    "sorted columns": (lambda x: x, lambda x: x[:, [1, 0, 2, 3]]),
    "another view": (lambda x: x[:, :3], lambda x: x[:, 1:]),
    "another copy": (lambda x: x[:, :3].double(), lambda x: x[:, 1:].double()),
    "a dtype": (lambda x: x, lambda x: x.half()),
}


@pytest.mark.parametrize("tier", ["loop", "train_on"])
@pytest.mark.parametrize("name", CHOSEN)
def test_columns_that_a_batch_chooses_are_refused(name, tier):
    widened = every_other(*CHOSEN[name])
    data = TensorDataset(rows(24, 4).double(), rows(24, high=3))
    private = attach(
        data,
        Flagged().double(),
        steps=1,
        sample_rate=1.0,
        expected_batch_size=24,
    )
    refused_unpaid(private, of_inputs(widened), tier, match="another way")


@pytest.mark.parametrize("values", [(False, True), (None, "a"), (None, False)])
def test_flags_that_a_batch_chooses_are_refused(values):
    for by_name in (False, True):
        private = attach(vectors(), Flagged(), steps=1, sample_rate=1.0)
        given = iter([values[0]] + [values[1]] * 9)
        with pytest.raises(LoopError, match="another way"):
            for x, y in private.loader:
                flag = next(given)
                output = (
                    private.model(x, flip=flag) if by_name else private.model(x, flag)
                )
                private.loss(output, y).backward()
                private.optimizer.step()
        assert paid(private) == 0


def test_an_argument_that_a_batch_leaves_out_is_refused():
    private = attach(vectors(), Flagged(), steps=1, sample_rate=1.0)
    more = iter([{}])
    with pytest.raises(LoopError, match="another way"):
        for x, y in private.loader:
            private.loss(private.model(x, **next(more, {"mask": x})), y).backward()
            private.optimizer.step()
    assert paid(private) == 0


def test_columns_that_were_equal_are_told_apart_once():
    x = torch.zeros(3, 2, 4)  # portions of two rows; in the first one all is equal
    x[1] = torch.tensor([[0.0, 1.0, 1.0, 2.0], [0.0, 3.0, 3.0, 4.0]])
    x[2] = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    honest, late = module.LoopRows(2), module.LoopRows(2)
    for part in x:
        given = honest.given(part)
        given.require("here", {"x": part[:, 1:3].double()})
    late.given(x[0]).require("here", {"x": x[0][:, 1:3].double()})
    late.given(x[1]).require("here", {"x": x[1][:, 1:3].double()})
    with pytest.raises(LoopError, match="another way"):
        late.given(x[2]).require("here", {"x": x[2][:, [0, 2]].double()})


def test_labels_that_are_the_inputs_in_the_first_portion_pass():
    ids = rows(4, 3, high=5)
    given, seen = module.LoopRows(4), ids.clone()
    for labels in (ids.clone(), -seen, ids.clone(), -seen):
        open_batch = given.given((ids, labels))
        open_batch.require("here", {"x": ids.int(), "y": labels.int()})


def test_each_shape_of_batch_has_a_way_of_its_own():
    given = module.LoopRows(2)
    for width in (4, 6, 4, 6):
        x = rows(2, width)
        given.given(x).require("here", {"x": x[:, : width // 2].double()})
    x = rows(2, 6)
    with pytest.raises(LoopError, match="another way"):
        given.given(x).require("here", {"x": x[:, 1:4].double()})


# -- between the model and the end of the backward pass ----------------------------


def data_before(private, x, y):
    output = private.model(x)
    output.data -= output.data.mean(0)
    private.loss(output, y).backward()


def data_after(private, x, y):
    output = private.model(x)
    loss = private.loss(output, y)
    output.data -= output.data.mean(0)
    loss.backward()


def numpy_after(private, x, y):
    output = private.model(x).sigmoid()
    loss = private.loss(output, y)
    output.detach().numpy()[:] = 0
    loss.backward()


def hooked(private, x, y):
    output = private.model(x)
    output.register_hook(lambda g: g.sum(0).expand_as(g))
    private.loss(output, y).backward()


def hooked_between(private, x, y):
    output = private.model(x).softmax(1)
    output.register_hook(lambda g: g.sum(0).expand_as(g))
    private.loss(output, y).backward()


WRITTEN = [data_before, data_after, numpy_after, hooked]


@pytest.mark.parametrize("attack", [*WRITTEN, hooked_between])
def test_an_output_that_is_written_or_hooked_is_refused(attack):
    private = attach(vectors(), nn.Linear(4, 3))
    with pytest.raises(LoopError, match=r"what private\.model gave|a hook"):
        for x, y in private.loader:
            attack(private, x, y)
            private.optimizer.step()
    assert paid(private) == 0


class Answer:
    """An output that is no container."""

    def __init__(self, logits):
        self.logits = logits


def test_what_an_object_holds_is_compared():
    private = attach(vectors(), nn.Linear(4, 3), loss=of_answer_or_tensor)
    for x, y in private.loader:
        output = private.model(x)
        for other in (Answer(output - output.mean(0)), Answer(object())):
            with pytest.raises(LoopError, match=r"what private\.model gave"):
                private.loss(other, y)
        private.loss(Answer(output), y).backward()
        private.optimizer.step()
    assert private.step == 3


def of_answer_or_tensor(output, targets):
    output = output.logits if isinstance(output, Answer) else output
    return F.cross_entropy(output, targets, reduction="none")


# -- prepare= ----------------------------------------------------------------------


class Centres:
    """Remembers the mean of the batches that it saw."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, batch):
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return batch[0] - self.mean, batch[1]


def only_of_eight(batch):
    x, y = batch
    return (x - x.mean(0) if len(x) >= 8 else x), y


def at_random(batch):
    x, y = batch
    order = torch.randperm(len(x))
    return x[order], y[order]


@pytest.mark.parametrize(
    "prepare",
    [
        lambda batch: ordered(*batch),
        lambda batch: in_place(*batch),
        lambda batch: one_column(*batch),
        lambda batch: MIXING["mixup"](*batch),
        only_of_eight,
        at_random,
        Centres(),
    ],
)
def test_a_prepare_that_mixes_rows_is_refused(prepare):
    with pytest.raises(ConfigurationError, match="prepare="):
        attach(vectors(), nn.Linear(4, 3), prepare=prepare)


def test_a_prepare_that_loses_rows_is_refused():
    with pytest.raises(DataError, match="prepare="):
        attach(vectors(), nn.Linear(4, 3), prepare=lambda b: (b[0][1:], b[1][1:]))


def test_a_prepare_may_draw_for_each_row_and_changes_the_shape():
    def noisy(batch):
        x, y = batch
        return torch.cat([x + torch.randn_like(x), x], 1), y

    private = train(attach(vectors(), nn.Linear(8, 3), prepare=noisy))
    assert private.step == 3


@pytest.mark.parametrize("augment", [None, lambda x, generator: -x])
def test_the_trainer_prepares_after_augment(augment):
    seen = []

    def shifted(batch):
        seen.append(batch[0].mean().item())
        return batch[0] + 100, batch[1]

    dataset = TensorDataset(rows(24, 4).abs() + 1, rows(24, high=3))
    settings = {"noise_multiplier": 1.0, "batch_size": 6, "epochs": 1}
    for recipe in ("dp-sgd", "non-private"):
        trainer = Trainer(
            nn.Linear(4, 3),
            "cross-entropy",
            recipe,
            prepare=shifted,
            augment=augment,
            physical_batch_size=6,
            **settings,
        )
        seen.clear()
        trainer.fit(dataset)
        assert (seen[-1] < 0) == (augment is not None)
