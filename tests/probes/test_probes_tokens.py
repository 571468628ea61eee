"""Token probes: the law of the words, special tokens, masks, and tokenizers."""

import pytest
import torch
from scipy.stats import chisquare

from curvedp.errors import ConfigurationError
from curvedp.probes import RankLaw, TokenProbe, TokenSpec, laws
from curvedp.probes.laws import draw_categories

from .examples import SPEC, seeded

#: A test of a true law fails with this probability; seeds are fixed besides.
SURE = 1e-4


def words_of(drawn):
    """Ids at the positions of words: inside the mask, without special tokens."""
    ids = drawn["input_ids"][drawn["attention_mask"] == 1]
    return ids[~torch.isin(ids, torch.tensor(sorted(SPEC.special)))]


def counts_by_rank(ids, spec):
    counts = torch.bincount(ids, minlength=spec.size)
    assert counts.sum() == counts[spec.ordinary].sum()  # nothing but words
    return counts[spec.ordinary].double()


@pytest.mark.parametrize(
    ("law", "weight"),
    [
        ("zipf", lambda r: (r + 2.7) ** -1.07),
        ("uniform", lambda r: 1.0),
        (RankLaw(exponent=2.0, shift=0.0), lambda r: r**-2.0),
    ],
)
def test_words_follow_their_law(law, weight):
    drawn = TokenProbe(SPEC, (4, 20), law).inputs(3000, seeded())
    counts = counts_by_rank(words_of(drawn), SPEC)
    expected = torch.tensor([weight(r) for r in range(1, len(counts) + 1)])
    expected = expected.double() / expected.double().sum() * counts.sum()
    assert chisquare(counts, expected).pvalue > SURE


def test_a_wrong_law_would_be_seen():
    drawn = TokenProbe(SPEC, (4, 20)).inputs(3000, seeded())
    counts = counts_by_rank(words_of(drawn), SPEC)
    assert chisquare(counts).pvalue < SURE


def test_the_public_order_gives_the_ranks():
    spec = TokenSpec(size=6, order=(5, 3, 1))  # 0, 2 and 4 are left out
    ids = TokenProbe(spec, (50, 50), as_mapping=False).inputs(200, seeded())
    counts = torch.bincount(ids.flatten(), minlength=6)
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[5] > counts[3] > counts[1] > 0


def test_lengths_are_uniform_over_the_range():
    drawn = TokenProbe(SPEC, (3, 9)).inputs(7000, seeded())
    lengths = drawn["attention_mask"].sum(1)
    counts = torch.bincount(lengths, minlength=11)
    assert counts[:3].sum() == 0
    assert counts[10:].sum() == 0
    assert chisquare(counts[3:10]).pvalue > SURE


def test_special_tokens_stand_in_the_mask_and_padding_outside():
    drawn = TokenProbe(SPEC, (2, 9)).inputs(500, seeded())
    ids, mask = drawn["input_ids"], drawn["attention_mask"]
    assert ids.shape == mask.shape == (500, 9)
    assert (ids[:, 0] == SPEC.cls).all()
    for row, on in zip(ids, mask, strict=True):
        length = int(on.sum())
        assert (on[:length] == 1).all()
        assert row[length - 1] == SPEC.sep
        assert (row[length:] == SPEC.pad).all()
        inner = row[1 : length - 1].tolist()
        assert not SPEC.special & set(inner)


def test_several_tokens_frame_a_sequence_in_their_order():
    spec = TokenSpec(size=20, pad=0, prefix=(1, 2), suffix=(3, 4, 5))
    drawn = TokenProbe(spec, (5, 8)).inputs(60, seeded())
    for row, on in zip(drawn["input_ids"], drawn["attention_mask"], strict=True):
        text = row[on == 1].tolist()
        assert text[:2] == [1, 2]
        assert text[-3:] == [3, 4, 5]
        assert not {0, 1, 2, 3, 4, 5} & set(text[2:-3])


def test_ids_alone_are_the_same_ids():
    mapping = TokenProbe(SPEC, (3, 9)).inputs(5, seeded())
    ids = TokenProbe(SPEC, (3, 9), as_mapping=False).inputs(5, seeded())
    assert torch.equal(ids, mapping["input_ids"])


def test_one_length_needs_no_padding():
    ids = TokenProbe(TokenSpec(size=4), (6, 6), as_mapping=False).inputs(3, seeded())
    assert ids.shape == (3, 6)


def test_a_law_over_few_ranks_sums_to_one_whatever_its_exponent():
    for law in (RankLaw(), RankLaw(0.0, 0.0), RankLaw(500.0, -0.9)):
        weights = law.weights(1000)
        assert float(weights.sum()) == pytest.approx(1.0)
        assert torch.isfinite(weights).all()


def test_a_category_without_weight_is_never_drawn():
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    drawn = draw_categories(weights, (5000,), seeded())
    assert set(drawn.tolist()) == {1, 3}
    assert float((drawn == 3).float().mean()) == pytest.approx(2 / 3, abs=0.03)


@pytest.mark.parametrize(("uniform", "category"), [(0.0, 1), (1.0, 3)])
def test_the_ends_of_the_unit_interval_are_categories_with_weight(
    monkeypatch, uniform, category
):
    monkeypatch.setattr(
        laws.torch, "rand", lambda *_, **__: torch.tensor([uniform]).double()
    )
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    assert draw_categories(weights, (1,), seeded()).tolist() == [category]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TokenSpec(size=0), "vocabulary"),
        (lambda: TokenSpec(size=-5), "vocabulary"),
        (lambda: TokenSpec(size=3, pad=3), "pad"),
        (lambda: TokenSpec(size=3, cls=-1), "cls"),
        (lambda: TokenSpec(size=3, order=(0, 0)), "twice"),
        (lambda: TokenSpec(size=3, order=(7,)), "order"),
        (lambda: TokenSpec(size=2, pad=0, unk=1), "special"),
        (lambda: TokenSpec(size=3, order=()), "special"),
        (lambda: TokenSpec(size=3, others=5), "others"),
        (lambda: TokenProbe(SPEC, (1, 5)), "lengths"),  # cls and sep need two
        (lambda: TokenProbe(SPEC, (5, 4)), "lengths"),
        (lambda: TokenProbe(SPEC, (2, -4)), "lengths"),
        (lambda: TokenProbe(SPEC, 12), "lengths"),
        (lambda: TokenProbe(SPEC, (4, 5), "zip"), "token law"),
        (lambda: TokenProbe(TokenSpec(size=5), (1, 5)), "pad"),
        (lambda: TokenProbe(50_000, (1, 5)), "from_tokenizer"),
        (lambda: RankLaw(exponent=float("nan")), "exponent"),
        (lambda: RankLaw(exponent=-1.0), "exponent"),
        (lambda: RankLaw(shift=-1.0), "shift"),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


class BertLike:
    """The interface of a Hugging Face tokenizer with BERT's way of framing."""

    words = ("[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a")
    pad_token_id, unk_token_id, mask_token_id = 0, 2, 5
    cls_token_id, sep_token_id = 3, 4
    bos_token_id = eos_token_id = None
    all_special_ids = (2, 4, 0, 3, 5)
    vocab_size = 8

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)} | {"added": 8}

    def encode(self, text):
        return [3, self.get_vocab().get(text, 2), 4]


class GptLike:
    """GPT-2's: one special id for everything, and none of them used."""

    pad_token_id = None
    bos_token_id = eos_token_id = unk_token_id = 5
    all_special_ids = (5,)

    def get_vocab(self):
        return {"!": 0, "a": 1, "b": 2, "c": 3, "<0x0A>": 4, "<|endoftext|>": 5}

    def encode(self, text):
        return [self.get_vocab()[text]]


class Bare:
    vocab_size = 7
    bos_token_id, eos_token_id = 0, 1


def test_bert_frames_its_texts():
    spec = TokenSpec.from_tokenizer(BertLike())
    assert spec.size == 9  # the added token counts, vocab_size does not know it
    assert (spec.prefix, spec.suffix, spec.pad) == ((3,), (4,), 0)
    assert spec.ordinary.tolist() == [6, 7, 8]  # no special and no reserved entries


def test_an_unknown_word_is_no_frame():
    class Unknowing(BertLike):
        def encode(self, text):
            return [2, 4]  # [UNK] [SEP]: it has a [CLS] and does not use it

    spec = TokenSpec.from_tokenizer(Unknowing())
    assert (spec.prefix, spec.suffix) == ((), (4,))


def test_gpt_does_not_frame_although_it_has_the_ids():
    spec = TokenSpec.from_tokenizer(GptLike())
    assert (spec.prefix, spec.suffix, spec.pad) == ((), (), None)
    assert spec.ordinary.tolist() == [0, 1, 2, 3]


def test_a_tokenizer_that_cannot_encode_is_framed_by_its_ids():
    spec = TokenSpec.from_tokenizer(Bare())
    assert (spec.size, spec.prefix, spec.suffix) == (7, (0,), (1,))
    assert spec.ordinary.tolist() == [2, 3, 4, 5, 6]


def test_a_given_order_replaces_the_tokenizers():
    spec = TokenSpec.from_tokenizer(BertLike(), order=[7, 0, 6])
    assert spec.ordinary.tolist() == [7, 6]


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ConfigurationError, match="get_vocab"):
        TokenSpec.from_tokenizer(object())

    class Empty:
        def get_vocab(self):
            return {}

    with pytest.raises(ConfigurationError, match="empty"):
        TokenSpec.from_tokenizer(Empty())


def test_the_description_tells_orders_apart():
    one, other = TokenSpec(size=5), TokenSpec(size=5, order=(1, 0, 2, 3, 4))
    assert one.describe() != other.describe()
    same = TokenSpec(size=5, order=(0, 1, 2, 3, 4))
    assert one.describe() == same.describe()
