"""Label rules: their laws, extremes, refusals, and padding that has no label."""

import math

import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import nn

from curvedp.errors import ConfigurationError
from curvedp.probes import (
    BernoulliLabels,
    GaussianLabels,
    ImageProbe,
    LabelRule,
    ModelLabels,
    OwnLabels,
    PublicProbe,
    TokenProbe,
    UniformLabels,
    draw,
    labels_for,
    laws,
)
from curvedp.train.losses import LOSSES, per_example_loss

from .examples import SPEC, pairs, seeded

RULES = [
    ModelLabels(),
    ModelLabels(temperature=3.0),
    UniformLabels(),
    GaussianLabels(),
    BernoulliLabels(),
    BernoulliLabels(probability=0.5),
]
LOGITS = torch.tensor([1.0, -2.0, 0.5, 0.0])


def repeated(logits, times=8000):
    return logits.expand(times, *logits.shape).clone()


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_model_labels_follow_the_softmax(temperature):
    rule = ModelLabels(temperature)
    drawn = rule.targets(repeated(LOGITS), seeded())
    expected = (LOGITS.double() / temperature).softmax(0) * len(drawn)
    counts = torch.bincount(drawn, minlength=4).double()
    enough = expected > 1
    scale = counts[enough].sum() / expected[enough].sum()
    assert chisquare(counts[enough], expected[enough] * scale).pvalue > 1e-4


def test_model_labels_of_sequences_belong_to_their_position():
    # position 0 is sure of class 2, position 1 of class 0
    output = torch.zeros(50, 2, 3)
    output[:, 0, 2] = output[:, 1, 0] = 60.0
    drawn = ModelLabels().targets(output, seeded())
    assert drawn.shape == (50, 2)
    assert (drawn[:, 0] == 2).all()
    assert (drawn[:, 1] == 0).all()


def test_the_score_of_model_labels_has_mean_zero_and_the_fisher_covariance():
    drawn = ModelLabels().targets(repeated(LOGITS, 40_000), seeded())
    p = LOGITS.softmax(0)
    score = nn.functional.one_hot(drawn, 4) - p
    torch.testing.assert_close(score.mean(0), torch.zeros(4), atol=0.01, rtol=0)
    fisher = torch.diag(p) - p[:, None] * p[None, :]
    torch.testing.assert_close(score.T @ score / 40_000, fisher, atol=0.01, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6])
def test_without_temperature_the_likeliest_class_is_taken(temperature):
    output = torch.randn(200, 5) * 10
    drawn = ModelLabels(temperature).targets(output, seeded())
    assert torch.equal(drawn, output.argmax(1))


@pytest.mark.parametrize("temperature", [1e6, 1e300])
def test_at_great_temperature_all_classes_are_alike(temperature):
    drawn = ModelLabels(temperature).targets(repeated(LOGITS), seeded())
    assert chisquare(torch.bincount(drawn, minlength=4)).pvalue > 1e-4


def test_huge_logits_do_not_overflow_and_excluded_classes_stay_out():
    output = repeated(torch.tensor([3e38, 3e38, -3e38, -math.inf]), 4000)
    drawn = ModelLabels().targets(output, seeded())
    counts = torch.bincount(drawn, minlength=4)
    assert counts[2:].sum() == 0
    assert chisquare(counts[:2]).pvalue > 1e-4


def test_a_threshold_rounded_to_the_total_is_still_a_class(monkeypatch):
    monkeypatch.setattr(
        laws.torch, "rand", lambda size, **_: torch.ones(size, dtype=torch.float64)
    )
    drawn = ModelLabels().targets(torch.tensor([[0.0, 3.0, -math.inf]]), seeded())
    assert drawn.tolist() == [1]


def test_blocks_change_nothing(monkeypatch):
    output = torch.randn(100, 7)
    whole = ModelLabels().targets(output, seeded())
    monkeypatch.setattr(laws, "_BLOCK", 20)
    assert torch.equal(whole, ModelLabels().targets(output, seeded()))


def test_uniform_labels_ignore_the_model():
    drawn = UniformLabels().targets(repeated(LOGITS * 100), seeded())
    assert chisquare(torch.bincount(drawn, minlength=4)).pvalue > 1e-4
    sequences = UniformLabels().targets(torch.zeros(5, 6, 3), seeded())
    assert sequences.shape == (5, 6)


@pytest.mark.parametrize("std", [1.0, 0.1])
def test_gaussian_labels_surround_the_prediction(std):
    output = torch.randn(3000, 2) * 5
    labels = GaussianLabels(std).targets(output, seeded())
    assert labels.shape == output.shape
    assert kstest(((labels - output) / std).flatten(), "norm").pvalue > 1e-4


def test_bernoulli_labels_follow_the_sigmoid_each_by_itself():
    labels = BernoulliLabels().targets(repeated(LOGITS), seeded())
    assert set(labels.unique().tolist()) == {0.0, 1.0}
    expected = LOGITS.sigmoid()
    torch.testing.assert_close(labels.mean(0), expected, atol=0.02, rtol=0)
    torch.testing.assert_close(
        labels.T.cov(), torch.diag(expected * (1 - expected)), atol=0.02, rtol=0
    )
    coins = BernoulliLabels(0.25).targets(repeated(LOGITS), seeded())
    torch.testing.assert_close(coins.mean(0), torch.full((4,), 0.25), atol=0.02, rtol=0)
    extreme = BernoulliLabels().targets(torch.tensor([[200.0, -200.0]]), seeded())
    assert extreme.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("rule", RULES)
def test_the_generator_decides_everything(rule):
    assert isinstance(rule, LabelRule)
    output = torch.randn(40, 5, requires_grad=True)
    state = torch.get_rng_state()
    first = rule.targets(output, seeded(1))
    assert torch.equal(first, rule.targets(output, seeded(1)))
    assert not torch.equal(first, rule.targets(output, seeded(2)))
    assert torch.equal(state, torch.get_rng_state())
    assert not first.requires_grad
    assert rule.describe()["kind"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_outputs_of_any_precision_are_taken(rule, dtype):
    targets = rule.targets(torch.zeros(4, 3, dtype=dtype), seeded())
    assert targets.dtype in (dtype, torch.int64)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_a_rule_that_it_can_take(name):
    rule = labels_for(name)
    output = torch.randn(6, 4, 5) if name == "language-modelling" else torch.randn(6, 5)
    losses = per_example_loss(name)(output, rule.targets(output, seeded()))
    assert losses.shape == (6,)
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        ("cross-entropy", ModelLabels()),
        ("language-modelling", ModelLabels()),
        ("mse", GaussianLabels()),
        ("bce", BernoulliLabels()),
        (nn.CrossEntropyLoss(), ModelLabels()),
        (nn.NLLLoss(), ModelLabels()),
        (nn.MSELoss(), GaussianLabels()),
        (nn.BCEWithLogitsLoss(), BernoulliLabels()),
    ],
)
def test_rules_by_loss(loss, rule):
    assert labels_for(loss) == rule


@pytest.mark.parametrize("loss", ["hinge", nn.L1Loss(), lambda a, b: a, None, ""])
def test_an_unknown_loss_has_no_rule(loss):
    with pytest.raises(ConfigurationError, match="no label rule") as error:
        labels_for(loss)
    assert "cross-entropy" in error.value.advice


@pytest.mark.parametrize("rule", RULES)
def test_only_tensors_of_numbers_are_outputs(rule):
    with pytest.raises(ConfigurationError, match="returns a dict"):
        rule.targets({"logits": torch.zeros(2, 3)}, seeded())
    with pytest.raises(ConfigurationError, match="returns"):
        rule.targets(torch.zeros(2, 3, dtype=torch.int64), seeded())
    with pytest.raises(ConfigurationError, match="returns"):
        rule.targets(torch.tensor(0.0), seeded())


@pytest.mark.parametrize("rule", [ModelLabels(), UniformLabels()])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 3, 4, 5)])
def test_logits_have_a_dimension_of_classes(rule, shape):
    with pytest.raises(ConfigurationError, match="shape"):
        rule.targets(torch.zeros(shape), seeded())


@pytest.mark.parametrize("rule", [ModelLabels(), GaussianLabels(), BernoulliLabels()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_output_that_is_not_finite_is_refused(rule, bad):
    output = torch.zeros(3, 4)
    output[1, 2] = bad
    with pytest.raises(ConfigurationError, match="not finite"):
        rule.targets(output, seeded())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelLabels(-1.0), "temperature"),
        (lambda: ModelLabels(math.nan), "temperature"),
        (lambda: ModelLabels(math.inf), "temperature"),
        (lambda: GaussianLabels(0.0), "std"),
        (lambda: GaussianLabels(math.nan), "std"),
        (lambda: BernoulliLabels(1.5), "probability"),
        (lambda: BernoulliLabels(math.nan), "probability"),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_draw_is_inputs_first_and_targets_later():
    drawn = draw(ImageProbe((1, 4, 4)), ModelLabels(), 6, seeded())
    generator = seeded()
    inputs = ImageProbe((1, 4, 4)).inputs(6, generator)
    assert torch.equal(drawn.inputs, inputs)
    output = inputs.flatten(1)
    expected = ModelLabels().targets(output, generator)
    assert torch.equal(drawn.targets(output), expected)


def test_own_labels_come_with_the_inputs():
    drawn = draw(PublicProbe(pairs()), OwnLabels(), 5, seeded())
    assert torch.equal(drawn.targets(torch.zeros(5, 2)) * 3.0, drawn.inputs[:, 0])
    with pytest.raises(ConfigurationError, match="ImageProbe has no labels"):
        draw(ImageProbe((1, 4, 4)), OwnLabels(), 5, seeded())
    with pytest.raises(ConfigurationError, match=r"probes\.draw"):
        OwnLabels().targets(torch.zeros(5, 2), seeded())


def test_padding_has_no_label_and_words_have():
    drawn = draw(TokenProbe(SPEC, (3, 9)), ModelLabels(), 40, seeded())
    targets = drawn.targets(torch.randn(40, 9, 30))
    hidden = drawn.inputs["attention_mask"] == 0
    assert hidden.any()
    assert (targets[hidden] == -100).all()
    assert (targets[~hidden] >= 0).all()
    losses = LOSSES["language-modelling"](torch.randn(40, 9, 30), targets)
    assert torch.isfinite(losses).all()


def test_labels_of_whole_texts_are_not_masked():
    # as many classes or texts as positions must not be taken for a mask
    drawn = draw(TokenProbe(SPEC, (3, 9)), ModelLabels(), 9, seeded())
    assert (drawn.targets(torch.randn(9, 9)) >= 0).all()
    several = draw(TokenProbe(SPEC, (3, 9)), BernoulliLabels(), 9, seeded())
    assert (several.targets(torch.randn(9, 9)) >= 0).all()
