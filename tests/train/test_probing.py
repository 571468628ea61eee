"""Probes and labels that a recipe takes where the user names none."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch
from curvedp.probes import BernoulliLabels, UniformLabels
from curvedp.recipes import Curvature
from curvedp.train.probing import choose_labels, choose_probe

WORDS, PLACES = 500, 6


class Reader(nn.Module):
    """Words, and where they stand; ``lookup`` says what words are looked up by."""

    def __init__(self, lookup=lambda ids: ids):
        super().__init__()
        self.places = nn.Embedding(PLACES, 4)
        self.words = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, 2)
        self.lookup = lookup

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head((self.words(self.lookup(ids)) + self.places(places)).mean(1))


def tokens():
    return Batch(torch.zeros(1, PLACES, dtype=torch.long), None)


def test_tokens_come_from_the_table_that_inputs_are_looked_up_in():
    model = Reader()
    probe = choose_probe(Curvature(), None, tokens(), model, None)
    drawn = probe.inputs(200, torch.Generator().manual_seed(0))
    assert int(drawn.max()) >= PLACES
    assert model.training
    assert not model.words._forward_pre_hooks


class Tagger(nn.Module):
    """Reads ids whose padding its table knows, with a mask or without."""

    def __init__(self, words=20, padding_idx=3):
        super().__init__()
        self.words = nn.Embedding(words, 4, padding_idx=padding_idx)
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            padding = self.words.padding_idx
            attention_mask = input_ids.ne(-1 if padding is None else padding).long()
        mask = attention_mask[..., None]
        return self.head((self.words(input_ids) * mask).sum(1) / mask.sum(1))


class Tokenizer:
    """Of 20 ids: 0 to 4 are special, and texts stand between 1 and 2."""

    pad_token_id, cls_token_id, sep_token_id, unk_token_id = 0, 1, 2, 4
    all_special_ids = (0, 1, 2, 4)

    def get_vocab(self):
        return {f"word {i}": i for i in range(20)}

    def encode(self, text):
        return [1, 7, 2]


class Collator:
    """As Hugging Face's: it holds the tokenizer and gives a mapping."""

    tokenizer = Tokenizer()

    def __call__(self, examples):
        ids, labels = torch.utils.data.default_collate(examples)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}, labels


def drawn_by(model, inputs, tokenizer=None):
    batch = Batch(inputs, None)
    probe = choose_probe(Curvature(), None, batch, model, None, tokenizer)
    return probe, probe.inputs(300, torch.Generator().manual_seed(0))


def masked(places=PLACES):
    ids = torch.zeros(1, places, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}


def test_padding_that_the_table_knows_stands_at_the_end_alone():
    zeros = torch.zeros(1, PLACES, dtype=torch.long)
    _, ids = drawn_by(Tagger(), zeros)
    lengths = (ids != 3).sum(1)
    places = torch.arange(PLACES)
    assert torch.equal(ids == 3, places >= lengths[:, None])
    assert set(lengths.tolist()) == set(range(1, PLACES + 1))
    _, whole = drawn_by(Tagger(padding_idx=None), zeros)
    assert (whole == 3).any(), "nothing is padding where none is declared"


def test_a_mask_is_exact_and_special_tokens_are_the_tokenizers():
    probe, drawn = drawn_by(Tagger(padding_idx=0), masked(), Tokenizer())
    ids, mask = drawn["input_ids"], drawn["attention_mask"]
    lengths = mask.sum(1)
    assert torch.equal(mask.bool(), torch.arange(PLACES) < lengths[:, None])
    assert torch.equal(ids == 0, mask == 0)
    assert set(lengths.tolist()) == set(range(3, PLACES + 1))
    assert (ids[:, 0] == 1).all()
    assert (ids.gather(1, lengths[:, None] - 1) == 2).all()
    inside = ids[:, 1:][torch.arange(1, PLACES) < lengths[:, None] - 1]
    assert not {0, 1, 2, 4} & set(inside.tolist())
    assert probe.spec.size == 20
    _, plain = drawn_by(Tagger(padding_idx=0), masked())
    assert torch.equal(plain["input_ids"] == 0, plain["attention_mask"] == 0)


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ConfigurationError, match=r"20 ids.*10 rows"):
        drawn_by(Tagger(10), masked(), Tokenizer())


def test_a_run_takes_the_tokenizer_of_its_collator():
    ids = torch.randint(5, 20, (20, PLACES))
    model = Tagger(padding_idx=0)
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(ids, torch.randint(0, 2, (20,))), recipe="dp-kfc",
        loss="cross-entropy", noise_multiplier=1.0, sample_rate=0.5, steps=2,
        expected_batch_size=10, delta=1e-3, collate_fn=Collator(), probe_size=8,
    )  # fmt: skip
    probe = private._engine.whiteners._how.probe
    assert (probe.spec.prefix, probe.spec.suffix) == ((1,), (2,))
    for inputs, labels in private.loader:
        private.loss(private.model(**inputs), labels).backward()
        private.optimizer.step()


def test_a_table_that_does_not_show_is_asked_for():
    model = Reader(lambda ids: ids + 1)
    with pytest.raises(ConfigurationError, match="6, 500 rows"):
        choose_probe(Curvature(), None, tokens(), model, None)


def test_uniform_labels_fit_the_loss():
    uniform = Curvature(labels="uniform")
    assert choose_labels(uniform, None, "cross-entropy") == UniformLabels()
    assert choose_labels(uniform, None, "bce") == BernoulliLabels(0.5)
    assert choose_labels(uniform, None, lambda output, y: output) == UniformLabels()
    with pytest.raises(ConfigurationError, match="regression"):
        choose_labels(uniform, None, "mse")


def attach(recipe, rate, **settings):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    data = TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))
    return make_private(
        model, torch.optim.SGD(model.parameters(), lr=rate), data, recipe=recipe,
        loss="cross-entropy", noise_multiplier=1.0, sample_rate=0.5, steps=2,
        expected_batch_size=10, delta=1e-3, **settings,
    )  # fmt: skip


def test_a_floor_that_follows_a_learning_rate_of_zero_is_refused():
    with pytest.raises(ConfigurationError, match="learning rate is 0"):
        attach("dp-ngd", 0.0)
    attach("dp-kfc", 0.0)  # has no such floor


def test_a_layer_that_is_left_out_must_exist():
    attach("dp-kfc", 0.1, leave_out="0, 1.bias")
    with pytest.raises(ConfigurationError, match="'fc', and no trained layer"):
        attach("dp-kfc", 0.1, leave_out="0, fc")
