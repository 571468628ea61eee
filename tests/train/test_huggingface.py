"""Hugging Face's collators and models, as they are used: padding that is masked passes.

Models are made from a configuration and the tokenizer from a few words: nothing is
downloaded.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from curvedp.errors import CouplingError
from curvedp.sampling.rows import RowCollate

from ..faults.cases import attach

transformers = pytest.importorskip("transformers")

WORDS = 40
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def tokenizer(side="right"):
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {
        "pad": "[PAD]",
        "unk": "[UNK]",
        "cls": "[CLS]",
        "sep": "[SEP]",
        "mask": "[MASK]",
    }
    words = [*special.values(), "the", "of", "and", "to", "in", *map(str, range(30))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        padding_side=side,
        **{f"{kind}_token": word for kind, word in special.items()},
    )


class Tokens(Dataset):
    """What ``tokenizer(text)`` gives, and a label of one of three forms."""

    def __init__(self, label="label", size=8):
        r = torch.Generator().manual_seed(0)
        self.records = []
        for n in torch.randint(4, 9, (size,), generator=r).tolist():
            ids = torch.randint(5, WORDS, (n,), generator=r).tolist()
            record = {"input_ids": ids, "attention_mask": [1] * n}
            if label == "label":
                record["label"] = ids[0] % 3
            elif label == "labels":
                record["labels"] = [k % 3 for k in ids]
            elif label == "summary":
                record["labels"] = ids[: n - 2]
            self.records.append(record)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        return self.records[i]


class Pairs:
    """(inputs, labels) out of a collator's dictionary; positions where asked for."""

    def __init__(self, collator, positions=False):
        self.collator, self.positions = collator, positions

    def __call__(self, examples):
        batch = dict(self.collator(examples))
        if self.positions:
            counted = batch["attention_mask"].cumsum(1) - 1
            batch["position_ids"] = counted.clamp_min(0)
        return batch, batch.pop("labels")


def of_tokens(output, y):
    """Each example's own mean over its own tokens."""
    losses = F.cross_entropy(output.logits.transpose(1, 2), y, reduction="none")
    return losses.sum(1) / (y != -100).sum(1).clamp_min(1)


def next_token(output, y):
    """Of a text's own words: what padding on the left predicts is left out."""
    y = torch.where(y[:, :-1] == -100, -100, y[:, 1:])
    return of_tokens(SimpleNamespace(logits=output.logits[:, :-1]), y)


def of_label(output, y):
    return F.cross_entropy(output.logits, y, reduction="none")


def bert(kind):
    config = transformers.BertConfig(**SIZES, num_labels=3, max_position_embeddings=64)
    return getattr(transformers, f"BertFor{kind}")(config)


def gpt2(kind="LMHeadModel"):
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=64,
        num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"GPT2{kind}")(config)


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, max_position_embeddings=64, pad_token_id=0)
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def prepared(model, label, collator, loss, **options):
    model.config.use_cache = False
    return attach(
        Tokens(label), model, collate_fn=collator, loss=loss, steps=2, **options
    )


def train(private):
    for inputs, y in private.loader:
        private.loss(private.model(**inputs), y).backward()
        private.optimizer.step()
    assert private.step == 2


def test_padding():
    collator = transformers.DataCollatorWithPadding(tokenizer())
    train(prepared(bert("SequenceClassification"), "label", Pairs(collator), of_label))


def test_token_classification():
    collator = transformers.DataCollatorForTokenClassification(tokenizer())
    train(prepared(bert("TokenClassification"), "labels", Pairs(collator), of_tokens))


def test_masked_language_modelling():
    collator = transformers.DataCollatorForLanguageModeling(tokenizer())
    private = prepared(bert("MaskedLM"), None, Pairs(collator), of_tokens)
    assert private._engine._loader._collate.free  # padding was tried
    train(private)


@pytest.mark.parametrize("model", [gpt2, llama])
def test_causal_language_modelling(model):
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    train(prepared(model(), None, Pairs(collator), next_token))


def test_sequences_to_sequences():
    model = t5()
    collator = transformers.DataCollatorForSeq2Seq(tokenizer(), model)
    train(prepared(model, "summary", Pairs(collator), of_tokens))


def test_padding_on_the_left():
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer("left"), mlm=False
    )
    pairs, counted = Pairs(collator), Pairs(collator, positions=True)
    prepared(llama(), None, pairs, next_token)  # rotary positions are relative
    prepared(gpt2(), None, counted, next_token)
    with pytest.raises(CouplingError, match="position ids from the mask"):
        prepared(gpt2(), None, pairs, next_token)


def test_a_mask_that_is_left_out():
    collator = transformers.DataCollatorWithPadding(tokenizer())

    def unmasked(examples):
        inputs, y = Pairs(collator)(examples)
        return {"input_ids": inputs["input_ids"]}, y

    with pytest.raises(CouplingError, match="not masked"):
        prepared(bert("SequenceClassification"), "label", unmasked, of_label)


def test_texts_are_made_up():
    words = tokenizer()

    def collate(examples):
        texts = [e["text"] for e in examples]
        batch = words(
            texts, padding=True, truncation=True, max_length=16, return_tensors="pt"
        )
        return batch, torch.tensor([e["label"] for e in examples])

    texts = [{"text": "12 of the 3 in 4", "label": 1}, {"text": "7", "label": 0}]
    assert RowCollate.of(texts, collate).free
