"""Padding to the longest of a batch: honoured by model and loss, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from curvedp.errors import CouplingError, DataError
from curvedp.train import padding

from ..faults.cases import attach
from ..faults.mutate import Patch, planted

WORDS, WIDTH, CLIP = 50, 8, 0.1


class Texts(Dataset):
    """Word numbers of different lengths, from 1 on, and a label."""

    def __init__(self, size=12, longest=9):
        r = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, longest, (size,), generator=r).tolist()
        self.ids = [torch.randint(1, WORDS, (n,), generator=r) for n in lengths]
        self.labels = torch.randint(0, 3, (size,), generator=r).tolist()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


def collate(examples, *, mask=True, side="right", positions=False):
    ids = pad_sequence([x for x, _ in examples], batch_first=True, padding_side=side)
    inputs = {"ids": ids}
    if mask:
        inputs["mask"] = pad_sequence(
            [torch.ones(len(x)) for x, _ in examples],
            batch_first=True,
            padding_side=side,
        )
    if positions:
        inputs["positions"] = (inputs["mask"].long().cumsum(1) - 1).clamp_min(0)
    return inputs, torch.tensor([y for _, y in examples])


def unmasked(examples):
    return collate(examples, mask=False)


def left(examples):
    return collate(examples, side="left")


def left_with_positions(examples):
    return collate(examples, side="left", positions=True)


class Bag(nn.Module):
    """A mean over words; over padding too where there is no mask."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids, mask=None):
        h = self.dropout(self.table(ids))
        mask = torch.ones_like(ids) if mask is None else mask
        h = (h * mask.unsqueeze(-1).to(h)).sum(1)
        return self.head(h / mask.sum(1, keepdim=True).clamp_min(1).to(h))


class Transformer(Bag):
    """Attention with positions: counted from the left, or as they are given."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(32, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids, mask, positions=None):
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand_as(ids)
        h = self.table(ids) + self.places(positions)
        seen = mask.bool()[:, None, :].expand(-1, ids.shape[1], -1)
        seen = seen | ~mask.bool()[:, :, None]  # padding sees all, and is not seen
        h = F.scaled_dot_product_attention(
            self.q(h),
            self.k(h),
            self.v(h),
            attn_mask=seen,
            dropout_p=0.1 if self.training else 0.0,
        )
        weights = mask.unsqueeze(-1).to(h)
        return self.head((h * weights).sum(1) / weights.sum(1).clamp_min(1))


class PaddingRow(Bag):
    """Counts on the row of padding to be zero, where noise arrives too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0)

    def forward(self, ids):
        return self.head(self.table(ids).sum(1))


class Last(Bag):
    """A recurrent net's last state, which has read the padding."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids, mask):
        return self.head(self.gru(self.table(ids))[1][0])


class OfToken(Bag):
    """A score for each position, for a loss in the loop."""

    def forward(self, ids, mask):
        return self.head(torch.tanh(self.table(ids)))


def prepared(model, collate_fn, data=None, **options):
    return attach(data or Texts(), model, collate_fn=collate_fn, **options)


def trained(private):
    for inputs, y in private.loader:
        private.loss(private.model(**inputs), y).backward()
        private.optimizer.step()
    assert private.step == 4


@pytest.mark.parametrize(
    ("model", "collate_fn"),
    [
        (lambda: Bag(0.1), collate),
        (Bag, left),
        (Transformer, collate),
        (Transformer, left_with_positions),
    ],
    ids=["bag", "bag-left", "transformer", "transformer-left-positions"],
)
def test_masked_padding_passes(model, collate_fn):
    trained(prepared(model(), collate_fn))


@pytest.mark.parametrize(
    ("model", "collate_fn", "words"),
    [
        (Bag, unmasked, "on the right"),
        (lambda: Bag(0.1), unmasked, "on the right"),
        (Transformer, left, "on the left"),
        (Last, collate, "on the right"),
        (PaddingRow, unmasked, "on the right"),
    ],
    ids=["no-mask", "dropout", "positions-from-the-left", "last-state", "zero-row"],
)
def test_padding_that_shows_is_refused(model, collate_fn, words):
    with pytest.raises(CouplingError, match=words) as refusal:
        prepared(model(), collate_fn)
    assert "ids from the mask" in str(refusal.value)


def moved_by_a_long_text(collate_fn):
    """How far the sum moves when one long text leaves, over C."""

    def summed(texts):
        private = prepared(
            Bag(),
            collate_fn,
            texts,
            rate=1.0,
            steps=1,
            clip_norm=CLIP,
            physical_batch_size=16,
        )
        for inputs, y in private.loader:
            private.loss(private.model(**inputs), y).backward()
            private._engine.accumulate()
        return torch.cat(
            [t.flatten() for t in private._engine._open.pending.values.values()]
        )

    with_it, without = Texts(), Texts()
    with_it.ids.append(torch.ones(60).long())
    with_it.labels.append(0)
    return float((summed(with_it) - summed(without)).norm()) / CLIP


def test_a_longer_neighbour_moves_the_sum_by_its_own_part():
    assert moved_by_a_long_text(collate) <= 1 + 1e-4
    with planted(Patch(padding._judged, "if close(", "if True or close(")):
        assert moved_by_a_long_text(unmasked) > 1.5


def test_a_loss_that_counts_padding_is_refused():
    class Tagged(Texts):
        def __getitem__(self, i):
            return self.ids[i], self.ids[i] % 3

    def tags(examples, pad=-100):
        ids = pad_sequence([x for x, _ in examples], batch_first=True)
        y = pad_sequence([y for _, y in examples], batch_first=True, padding_value=pad)
        return {"ids": ids, "mask": (ids > 0).float()}, y

    def loss(scores, y):
        losses = F.cross_entropy(scores.transpose(1, 2), y, reduction="none")
        return losses.sum(1) / (y >= 0).sum(1).clamp_min(1)

    attach(Tagged(), OfToken(), collate_fn=tags, loss=loss)
    with pytest.raises(CouplingError, match="padding is not masked"):
        attach(Tagged(), OfToken(), collate_fn=lambda e: tags(e, pad=0), loss=loss)


def test_without_a_loss_an_examples_own_outputs_are_compared():
    for model in (Bag(), OfToken()):
        attach(Texts(), model, collate_fn=collate, loss=None)
    with pytest.raises(CouplingError, match="longer example"):
        attach(Texts(), Transformer(), collate_fn=left, loss=None)


def test_a_length_that_the_model_does_not_take_is_refused_in_the_run():
    class Fixed(nn.Module):
        """Takes five words and nothing else."""

        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(WORDS, 2), nn.Linear(10, 3)

        def forward(self, ids, mask):
            return self.head(self.table(ids).flatten(1))

    data = Texts()
    data.ids = [x.repeat(2)[:5] for x in data.ids]
    prepared(Fixed(), collate, data)
    data.ids[3] = torch.ones(6).long()
    private = prepared(Fixed(), collate, data, rate=1.0)
    with pytest.raises(DataError, match="varies"):
        next(iter(private.loader))
    assert private._engine.ledger.count() == 0


def test_public_examples_show_lengths():
    texts = Texts()
    sample = [(torch.arange(1, n), 0) for n in (3, 6, 4)]
    trained(prepared(Bag(), collate, texts, sample=sample))
    with pytest.raises(CouplingError, match="longer example"):
        prepared(Bag(), unmasked, texts, sample=sample)
