"""Rows of tables and hashed documents."""

import math

import pytest
import torch
from scipy.stats import chisquare, kstest, truncnorm

from curvedp.errors import ConfigurationError
from curvedp.probes import (
    CategoryColumn,
    FeatureProbe,
    HashedDocumentProbe,
    Hashing,
    NormalColumn,
    RangeColumn,
    RankLaw,
)
from curvedp.probes.documents import murmur3

from .examples import seeded


def column(law, size=5000):
    return FeatureProbe((law,)).inputs(size, seeded())


def test_plain_columns_are_standard_normal_and_independent():
    rows = FeatureProbe(3).inputs(5000, seeded())
    for values in rows.T:
        assert kstest(values, "norm").pvalue > 1e-4
    torch.testing.assert_close(rows.T.cov(), torch.eye(3), atol=0.06, rtol=0)


def test_a_normal_column_has_its_mean_and_std():
    values = column(NormalColumn(mean=3.0, std=0.5)).flatten()
    assert kstest((values - 3.0) / 0.5, "norm").pvalue > 1e-4


def test_a_range_is_uniform_between_its_limits():
    values = column(RangeColumn(-2.0, 6.0)).flatten()
    assert kstest((values + 2.0) / 8.0, "uniform").pvalue > 1e-4
    assert values.min() >= -2
    assert values.max() <= 6


def test_a_truncated_range_gathers_around_the_middle():
    values = column(RangeColumn(-2.0, 6.0, truncated=True), 50_000).flatten()
    assert kstest(values, truncnorm(-2, 2, loc=2.0, scale=2.0).cdf).pvalue > 1e-4
    assert values.min() >= -2
    assert values.max() <= 6
    assert values.max() > 5  # the tails are there


def test_categories_are_one_hot_with_their_frequencies():
    rows = column(CategoryColumn(3, weights=(1, 0, 3)))
    assert rows.shape == (5000, 3)
    assert (rows.sum(1) == 1).all()
    assert set(rows.unique().tolist()) == {0.0, 1.0}
    assert rows[:, 1].sum() == 0
    assert chisquare(rows[:, [0, 2]].sum(0), [1250, 3750]).pvalue > 1e-4
    alike = column(CategoryColumn(4))
    assert chisquare(alike.sum(0)).pvalue > 1e-4


def test_columns_stand_in_their_order():
    probe = FeatureProbe((RangeColumn(5, 6), CategoryColumn(2), RangeColumn(-6, -5)))
    rows = probe.inputs(50, seeded())
    assert rows.shape == (50, 4)
    assert (rows[:, 0] >= 5).all()
    assert (rows[:, 1:3].sum(1) == 1).all()
    assert (rows[:, 3] <= -5).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: FeatureProbe(0),
        lambda: FeatureProbe(-1),
        lambda: FeatureProbe(()),
        lambda: FeatureProbe((1, 2)),
        lambda: FeatureProbe(True),
        lambda: FeatureProbe("abc"),
        lambda: NormalColumn(std=0.0),
        lambda: NormalColumn(mean=math.nan),
        lambda: RangeColumn(1, 1),
        lambda: RangeColumn(0, math.inf),
        lambda: CategoryColumn(0),
        lambda: CategoryColumn(2, weights=(1.0,)),
        lambda: CategoryColumn(2, weights=(0.0, 0.0)),
        lambda: CategoryColumn(2, weights=(1.0, -1.0)),
    ],
)
def test_impossible_columns_are_refused(make):
    with pytest.raises(ConfigurationError, match=r"column|categories"):
        make()


@pytest.mark.parametrize(
    ("word", "unsigned"),
    [
        ("", 0),
        ("test", 0xBA6BD213),
        ("Hello, world!", 0xC0363E43),
        ("The quick brown fox jumps over the lazy dog", 0x2E4FF723),
    ],
)
def test_the_hash_is_murmurhash3(word, unsigned):
    assert murmur3(word) % 2**32 == unsigned
    assert -(2**31) <= murmur3(word) < 2**31


DOCUMENTS = ["the cat the dog", "dog", "a b c d e f g a a", "über café über"]
WORDS = tuple(sorted({word for text in DOCUMENTS for word in text.split()}))


def hashed(hashing):
    """The documents above through a hashing."""
    longest = max(len(text.split()) for text in DOCUMENTS)
    ids = torch.zeros(len(DOCUMENTS), longest, dtype=torch.int64)
    present = torch.zeros_like(ids)
    for i, text in enumerate(DOCUMENTS):
        for t, word in enumerate(text.split()):
            ids[i, t], present[i, t] = WORDS.index(word), 1
    columns, signs = hashing.places(WORDS)
    return hashing.features(columns[ids], signs[ids], present)


@pytest.mark.parametrize("dimension", [3, 16, 1000])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("l2", [True, False])
def test_hashing_is_that_of_scikit_learn(dimension, signed, binary, l2):
    text = pytest.importorskip("sklearn.feature_extraction.text")
    vectorizer = text.HashingVectorizer(
        n_features=dimension,
        alternate_sign=signed,
        binary=binary,
        norm="l2" if l2 else None,
        tokenizer=str.split,
        token_pattern=None,
        lowercase=False,
    )
    expected = torch.tensor(vectorizer.transform(DOCUMENTS).toarray()).float()
    found = hashed(Hashing(dimension, signed, binary, l2))
    torch.testing.assert_close(found, expected)


def test_hashing_by_hand():
    # columns by |h| mod 3, signs by the sign of h; one column is hit twice
    hashing = Hashing(3, l2=False, function={"x": -4, "y": 1, "z": 5}.__getitem__)
    columns, signs = hashing.places(("x", "y", "z"))
    assert columns.tolist() == [1, 1, 2]
    assert signs.tolist() == [-1, 1, 1]
    counts = hashing.features(columns[None], signs[None], torch.tensor([[1, 0, 1]]))
    assert counts.tolist() == [[0, -1, 1]]
    # words that cancel leave a document without a length
    scaled = Hashing(3, function=hashing.function)
    nothing = scaled.features(columns[None], signs[None], torch.tensor([[1, 1, 0]]))
    assert nothing.tolist() == [[0, 0, 0]]


def test_documents_are_bags_of_words_by_rank():
    # no two of the four words share a feature, so features count words
    hashing = Hashing(
        4, l2=False, function={"a": 0, "b": 1, "c": 2, "d": 3}.__getitem__
    )
    probe = HashedDocumentProbe(hashing, (5, 15), words=("a", "b", "c", "d"))
    counts = probe.inputs(2000, seeded())
    lengths = counts.sum(1)
    assert (lengths.min(), lengths.max()) == (5, 15)
    assert chisquare(torch.bincount(lengths.long())[5:]).pvalue > 1e-4
    expected = RankLaw().weights(4) * counts.sum()
    assert chisquare(counts.sum(0).double(), expected).pvalue > 1e-4


def test_documents_are_normalised_when_the_users_are():
    probe = HashedDocumentProbe(Hashing(64), (1, 30), words=500)
    rows = probe.inputs(300, seeded())
    lengths = rows.norm(dim=1)
    full = lengths > 0  # words that cancel leave nothing
    assert full.float().mean() > 0.95
    torch.testing.assert_close(lengths[full], torch.ones(int(full.sum())))


def test_a_word_list_is_in_the_description():
    facts = [
        HashedDocumentProbe(Hashing(8), (1, 2), words=words).describe()
        for words in [3, ("a", "b", "c"), ("a", "c", "b")]
    ]
    assert facts[0] != facts[1] != facts[2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Hashing(0), "dimension"),
        (lambda: Hashing(8, function=3), "hash function"),
        (lambda: HashedDocumentProbe(8, (1, 2)), "hashing"),
        (lambda: HashedDocumentProbe(Hashing(8), (0, 2)), "lengths"),
        (lambda: HashedDocumentProbe(Hashing(8), (1, 2), words=0), "words"),
        (lambda: HashedDocumentProbe(Hashing(8), (1, 2), words=()), "words"),
        (lambda: HashedDocumentProbe(Hashing(8), (1, 2), words="abc"), "words"),
        (lambda: HashedDocumentProbe(Hashing(8), (1, 2), law="x"), "law"),
    ],
)
def test_impossible_documents_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
