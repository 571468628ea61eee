"""DP-SGD-PT: parameters from public data, and from nothing else."""

import pytest
import torch
from torch.utils.data import TensorDataset

from curvedp import Trainer
from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.probes import FeatureProbe, NormalColumn, OracleProbe, PublicProbe
from curvedp.recipes import RECIPES, Pretraining
from curvedp.train.tensors import read_tensors

from .test_whitened_recipes import attach, examples, flat, model, train


def public(n=60):
    """Labels that can be learnt: the brightest of three places."""
    x = torch.randn(n, 1, 6, 5, generator=torch.Generator().manual_seed(9))
    return TensorDataset(x, x[:, 0, 0, :3].argmax(1))


def pretrained(dataset=None, **options):
    settings = {"probes": PublicProbe(public()), "pretrain_epochs": 30, **options}
    return attach(dataset or examples(), "dp-sgd-pt", **settings)


def accuracy(own, data):
    x, y = data.tensors
    with torch.no_grad():
        return float((own(x).argmax(1) == y).float().mean())


def test_the_parameters_have_learnt_from_public_data_before_the_first_step():
    private = pretrained()
    assert private.step == 0
    own = private._engine.model
    assert accuracy(own, public()) > accuracy(model(), public()) + 0.3
    assert all(p.grad is None for p in own.parameters())
    assert own.training


def test_they_are_a_function_of_public_things_alone():
    other = TensorDataset(*(t[:30] * 1 for t in examples(seed=4).tensors))
    one, two = pretrained(), pretrained(other)
    assert torch.equal(flat(one.model), flat(two.model))
    assert not torch.equal(flat(one.model), flat(pretrained(seed=4).model))
    state = torch.random.get_rng_state()
    pretrained()
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("save", [True, False])
def test_a_resumed_run_ends_with_the_same_bits(save, tmp_path):
    whole = train(pretrained())
    with pretrained(run_dir=tmp_path / "run") as first:
        train(first, 3)
        if save:
            first.save()  # otherwise the journal goes on from the same parameters
    with pretrained(run_dir=tmp_path / "run") as second:
        second.resume()
        assert second.step == 3
        assert torch.equal(train(second), whole)


def test_a_run_with_a_checkpoint_does_not_pretrain_again(tmp_path, monkeypatch):
    with pretrained(run_dir=tmp_path / "run") as first:
        train(first, 2)
        first.save()

    def refuse(*_):
        raise AssertionError("pretrained again")

    monkeypatch.setattr("curvedp.train.pretrain.pretrain", refuse)
    with pretrained(run_dir=tmp_path / "run") as second:
        second.resume()


def test_the_parameters_are_kept_and_taken_again(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with pretrained(run_dir=folder) as first:
        before = flat(first._engine.model)
        train(first, 3)
    stored, facts = read_tensors(folder / "pretrained.safetensors")
    assert facts["kind"] == "curvedp-pretrained"
    names = [name for name, _ in model().named_parameters()]
    assert torch.equal(torch.cat([stored[n].flatten() for n in names]), before)

    def refuse(*_):
        raise AssertionError("pretrained again")

    with monkeypatch.context() as patch:
        patch.setattr("curvedp.train.pretrain.pretrain", refuse)
        with pretrained(run_dir=folder, seed=8) as second:  # no checkpoint was saved
            assert torch.equal(flat(second._engine.model), before)
    with pretrained(run_dir=folder, pretrain_epochs=2) as other:
        assert not torch.equal(flat(other._engine.model), before)


def test_other_pretraining_is_another_run(tmp_path):
    with pretrained(run_dir=tmp_path / "run") as first:
        first.save()
    with (
        pretrained(run_dir=tmp_path / "run", pretrain_epochs=2) as second,
        pytest.raises(CurvedpError, match="pretrain"),
    ):
        second.resume()


def test_the_statement_says_where_the_parameters_started():
    statement = pretrained(unsafe_reproducible_noise=None).statement()
    assert statement.facts["private"]
    assert any("to pretrain on" in c for c in statement.caveats)
    assert "declared public" in dict(statement.lines)["start"]
    plain = attach(examples(), "dp-sgd").statement()
    assert "start" not in dict(plain.lines)


@pytest.mark.parametrize(
    ("probe", "match"),
    [
        (None, "none was given"),
        (OracleProbe(examples()), "OracleProbe"),
        (FeatureProbe((NormalColumn(),)), "FeatureProbe"),
        (PublicProbe(public().tensors[0]), "no labels"),
    ],
)
def test_other_data_is_refused(probe, match):
    with pytest.raises(ConfigurationError, match=match):
        pretrained(probes=probe)


def test_a_rate_that_diverges_is_named():
    with pytest.raises(ConfigurationError, match="pretrain_learning_rate"):
        pretrained(pretrain_learning_rate=1e38)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pretrain_epochs": -1}, {"pretrain_batch_size": 0}, {"pretrain_epochs": 1.5},
        {"pretrain_learning_rate": 0.0}, {"pretrain_momentum": -1.0},
        {"pretrain_labels": "model"}, {"pretrain_temperature": 0.0},
        {"pretrain_batch_size": 1, "pretrain_labels": "simclr"},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        RECIPES["dp-sgd-pt"].configure(**wrong)
    with pytest.raises(ConfigurationError, match="no setting"):
        RECIPES["dp-sgd"].configure(**wrong)


def test_random_labels_need_none_and_are_learnt():
    inputs = public().tensors[0]
    settings = {"pretrain_labels": "random", "pretrain_epochs": 60}
    one = pretrained(probes=PublicProbe(inputs), **settings)
    pairs = TensorDataset(inputs, torch.zeros(60, dtype=torch.long))
    other = pretrained(probes=PublicProbe(pairs), **settings)
    assert torch.equal(flat(one.model), flat(other.model))  # own labels are not seen
    assert not torch.equal(flat(one.model), flat(model()))
    with torch.no_grad():
        sure = one._engine.model(inputs).softmax(1).max(1).values.mean()
        unsure = model()(inputs).softmax(1).max(1).values.mean()
    assert sure > unsure + 0.1  # it has told the inputs apart


def test_steps_count_whole_batches():
    assert Pretraining(pretrain_epochs=3, pretrain_batch_size=20).steps(65) == 9
    assert Pretraining(pretrain_epochs=3, pretrain_batch_size=20).steps(5) == 3


def test_the_trainer_pretrains_too():
    own = model()
    trainer = Trainer(
        own, "cross-entropy", "dp-sgd-pt", noise_multiplier=1.0, sample_rate=0.5,
        steps=1, expected_batch_size=20, seed=1, probes=PublicProbe(public()),
        learning_rate=1e-6, momentum=0.0, pretrain_epochs=30, pretrain_batch_size=20,
    )  # fmt: skip
    trainer.fit(examples())
    assert accuracy(own, public()) > accuracy(model(), public()) + 0.3


CORRELATED = ("dp-bandmf", "noisecurve", "dp-kfc+noisecurve")


@pytest.mark.parametrize("recipe", CORRELATED)
def test_correlated_noise_may_start_from_unlabelled_images(recipe):
    images = PublicProbe(public().tensors[0])
    plain = attach(examples(), recipe, probes=None)
    assert "start" not in dict(plain.statement().lines)
    private = attach(
        examples(), recipe, probes=images, pretrain_epochs=3, pretrain_batch_size=20,
        pretrain_labels="simclr",
    )  # fmt: skip
    own = private._engine.model
    assert torch.equal(own[-1].weight, model()[-1].weight)
    assert not torch.equal(own[0].weight, model()[0].weight)
    assert "declared public" in dict(private.statement().lines)["start"]
    with pytest.raises(ConfigurationError, match="none was given"):
        attach(examples(), recipe, pretrain_epochs=3)


def test_a_spectrum_is_that_of_the_pretrained_net():
    def largest(**settings):
        probes = PublicProbe(public())
        private = attach(examples(), "noisecurve", probes=probes, **settings)
        return private.plan.correlation.spectrum["largest"]

    before = largest()
    assert largest(pretrain_epochs=0) == before
    after = largest(pretrain_epochs=30, pretrain_batch_size=20)
    assert abs(after / before - 1) > 0.2
