"""Probes in embedding space, and probes that a public language model writes."""

import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError
from curvedp.probes import (
    EmbeddingTokenProbe,
    GeneratedTokenProbe,
    RankLaw,
    TokenSpec,
)

from .examples import SPEC, language_model, matrix, seeded

PLAIN = TokenSpec(size=30)


def embedded(**settings):
    return EmbeddingTokenProbe.from_matrix(
        **{"embedding": matrix(), "spec": PLAIN, "lengths": (8, 8), **settings}
    )


@pytest.mark.parametrize("law", ["zipf", "uniform"])
def test_every_position_has_the_weighted_moments_of_the_words(law):
    weights = RankLaw.parse(law).weights(30)
    table = matrix().double()
    mean = weights @ table
    covariance = (table - mean).T @ torch.diag(weights) @ (table - mean)
    drawn = embedded(law=law).inputs(20_000, seeded())["inputs_embeds"].double()
    for t in (0, 7):
        torch.testing.assert_close(drawn[:, t].mean(0), mean, atol=0.05, rtol=0)
        torch.testing.assert_close(drawn[:, t].T.cov(), covariance, atol=0.07, rtol=0)


@pytest.mark.parametrize("rho", [0.0, 0.14, 0.8, -0.5])
def test_positions_correlate_geometrically(rho):
    drawn = embedded(correlation=rho).inputs(20_000, seeded())["inputs_embeds"]
    centred = drawn - drawn.mean((0, 1))
    variance = centred.square().sum(-1).mean()
    for lag in (1, 2):
        product = (centred[:, lag:] * centred[:, :-lag]).sum(-1).mean()
        assert float(product / variance) == pytest.approx(rho**lag, abs=0.02)


def test_words_by_rank_have_more_weight():
    # all rows alike but the first: its weight is in the mean
    table = torch.zeros(30, 1)
    table[0] = 1.0
    probe = embedded(embedding=table)
    assert float(probe.mean) == pytest.approx(float(RankLaw().weights(30)[0]))


def test_special_tokens_have_their_own_embeddings():
    table = matrix()
    probe = embedded(embedding=table, spec=SPEC, lengths=(2, 6))
    drawn = probe.inputs(200, seeded())
    x, mask = drawn["inputs_embeds"], drawn["attention_mask"]
    assert (x[:, 0] == table[SPEC.cls]).all()
    for row, on in zip(x, mask, strict=True):
        length = int(on.sum())
        assert torch.equal(row[length - 1], table[SPEC.sep])
        assert (row[length:] == table[SPEC.pad]).all()
    # words only: the moments leave special tokens out
    weights = RankLaw().weights(len(SPEC.ordinary))
    expected = weights @ table[SPEC.ordinary].double()
    torch.testing.assert_close(probe.mean.double(), expected, atol=1e-5, rtol=0)


def test_a_later_change_of_the_matrix_changes_nothing():
    table = matrix()
    probe = embedded(embedding=table, spec=SPEC, lengths=(2, 9))
    before = probe.inputs(3, seeded())["inputs_embeds"]
    table.zero_()
    assert torch.equal(before, probe.inputs(3, seeded())["inputs_embeds"])


def test_a_singular_covariance_is_no_obstacle():
    # more dimensions than words: some eigenvalues are rounded below zero
    drawn = embedded(embedding=matrix(30, 40)).inputs(50, seeded())["inputs_embeds"]
    assert torch.isfinite(drawn).all()
    table = torch.ones(30, 5)
    table[:, 0] = torch.arange(30.0)
    drawn = embedded(embedding=table).inputs(50, seeded())["inputs_embeds"]
    torch.testing.assert_close(
        drawn[..., 1:], torch.ones_like(drawn[..., 1:]), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"embedding": matrix(29)}, "embedding matrix"),
        ({"embedding": torch.zeros(30)}, "embedding matrix"),
        ({"embedding": [[0.0]] * 30}, "embedding matrix"),
        ({"embedding": torch.full((30, 2), float("nan"))}, "finite"),
        ({"correlation": 1.0}, "correlation"),
        ({"correlation": float("nan")}, "correlation"),
        ({"source": "public"}, "source"),
        ({"lengths": (4, 8)}, "pad"),
    ],
)
def test_impossible_embeddings_are_refused(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        embedded(**settings)


def generated(**settings):
    return GeneratedTokenProbe(
        **{"model": language_model(), "spec": SPEC, "lengths": (6, 6), **settings}
    )


def transitions(probe, size=4000):
    """Counts of words after words, ``[V, V]``, special tokens left out."""
    ids = probe.inputs(size, seeded())["input_ids"]
    before, after = ids[:, 1:-2].flatten(), ids[:, 2:-1].flatten()
    return torch.bincount(before * 30 + after, minlength=900).reshape(30, 30)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_words_follow_the_model(temperature):
    words = SPEC.ordinary
    counts = transitions(generated(temperature=temperature))
    logits = language_model()(torch.arange(30)).double()[:, words] / temperature
    for word in words[:5]:
        observed = counts[word][words].double()
        expected = logits[word].softmax(0) * observed.sum()
        many = expected > 5  # chi-square needs some of each
        assert observed[many].sum() > 100
        scale = observed[many].sum() / expected[many].sum()
        assert chisquare(observed[many], expected[many] * scale).pvalue > 1e-4


def test_the_first_word_follows_the_prefix():
    ids = generated().inputs(4000, seeded())["input_ids"]
    words = SPEC.ordinary
    observed = torch.bincount(ids[:, 1], minlength=30)[words].double()
    logits = language_model()(torch.tensor(SPEC.cls)).double()[words]
    expected = logits.softmax(0) * observed.sum()
    assert chisquare(observed, expected).pvalue > 1e-4


def test_without_a_prefix_the_first_word_follows_its_rank():
    ids = generated(spec=PLAIN).inputs(4000, seeded())["input_ids"]
    observed = torch.bincount(ids[:, 0], minlength=30).double()
    expected = RankLaw().weights(30) * observed.sum()
    assert chisquare(observed, expected).pvalue > 1e-4


def test_at_temperature_zero_the_likeliest_word_comes():
    ids = generated(temperature=0.0).inputs(3, seeded())["input_ids"]
    words = SPEC.ordinary
    table = language_model()(torch.arange(30))
    for before, after in zip(ids[0, :-2], ids[0, 1:-1], strict=True):
        assert after == words[table[before][words].argmax()]
    cold = generated(temperature=1e-300).inputs(3, seeded(8))["input_ids"]
    assert torch.equal(cold, ids)


def test_special_ids_are_never_written():
    def loves_special(ids):
        logits = torch.zeros(*ids.shape, 40)  # more ids than the vocabulary has
        logits[..., :4] = 50.0
        logits[..., 30:] = 50.0
        return logits

    drawn = generated(model=loves_special, lengths=(4, 9)).inputs(200, seeded())
    for row, on in zip(drawn["input_ids"], drawn["attention_mask"], strict=True):
        text = row[on == 1].tolist()
        assert (text[0], text[-1]) == (SPEC.cls, SPEC.sep)
        assert not (SPEC.special | set(range(30, 40))) & set(text[1:-1])
        assert (row[on == 0] == SPEC.pad).all()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 30)
        self.out.eval()

    def forward(self, ids):
        class Output:
            logits = self.out(self.drop(self.embed(ids)))

        return Output


def test_a_module_writes_in_evaluation_mode_and_keeps_its_own():
    network = Network()
    probe = generated(model=network)
    state = torch.get_rng_state()
    first = probe.inputs(5, seeded())["input_ids"]
    assert torch.equal(state, torch.get_rng_state())  # no dropout
    assert torch.equal(first, probe.inputs(5, seeded())["input_ids"])
    assert network.training
    assert network.drop.training
    assert not network.out.training


def test_the_model_that_is_being_trained_is_declared():
    assert generated().provenance is Provenance.PUBLIC
    trained = generated(source=Provenance.RELEASED)
    assert trained.provenance is Provenance.RELEASED


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "gpt2"}, "language model"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"source": "public"}, "source"),
        ({"lengths": (1, 4)}, "lengths"),
    ],
)
def test_impossible_generators_are_refused(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        generated(**settings)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda ids: torch.zeros(*ids.shape, 29), "logits"),
        (lambda ids: torch.zeros(len(ids), 30), "logits"),
        (lambda ids: {"scores": 0}, "logits"),
        (lambda ids: torch.full((*ids.shape, 30), float("nan")), "not finite"),
    ],
)
def test_a_model_that_gives_no_logits_is_refused(model, words):
    with pytest.raises(ConfigurationError, match=words):
        generated(model=model).inputs(2, seeded())
