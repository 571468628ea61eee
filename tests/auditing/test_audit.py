"""Audits of whole runs: the witness by its definition, any model, any recipe."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from curvedp.auditing import Canaries, audit, audit_all, audit_worst_case, plot_audits
from curvedp.auditing.bounds import Rates
from curvedp.auditing.evidence import Evidence, Proof
from curvedp.auditing.witness import Witness
from curvedp.clipping import clipped_sum
from curvedp.errors import ConfigurationError, NotPrivateError
from curvedp.layers import Batch
from curvedp.recipes import RECIPES

from ..train.test_whitened_recipes import attach, examples, model

SMALL = {
    "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.5, "steps": 3,
    "expected_batch_size": 20, "unsafe_reproducible_noise": 3,
}  # fmt: skip


# -- the witness -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("dp-sgd", {}),
        ("dp-sgd", {"clipping": "per-layer"}),
        ("dp-sgd", {"clipping": "normalised"}),
        ("dp-kfc", {}),
        ("dp-ngd", {}),
        ("gep", {}),
    ],
)
def test_directions_are_the_clipped_gradients(recipe, options):
    """Against clipped sums of one example each, written out."""
    private = attach(examples(), recipe, clip_norm=0.1, **options)
    engine = private._engine
    batch = Batch(*examples(6, seed=5).tensors)
    witness = Witness(private, [batch], first=40)
    (found,) = witness._directions(batch, 0)
    generator = torch.Generator().manual_seed(0)
    residual = {
        n: torch.randn(p.shape, generator=generator)
        for n, p in engine.parameters.items()
    }
    for i, (projected, squared) in enumerate(
        zip(found.projections(residual), found.sq_norms(), strict=True)
    ):
        alone = clipped_sum(
            found.ios, engine._rule(), engine._clip_map(0),
            parameters=engine.parameters, present=torch.arange(6) == i, step=0,
        ).values  # fmt: skip
        expected = sum(float((alone[n] * residual[n]).sum()) for n in residual)
        length = sum(float(v.double().square().sum()) for v in alone.values())
        assert float(projected) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert float(squared) == pytest.approx(length, rel=1e-3)
        assert length <= 0.1**2 * (1 + 1e-6)
        row = found.written(residual)[i]
        whole = torch.cat([alone[n].flatten() for n in residual])
        assert torch.allclose(row, whole, rtol=1e-3, atol=1e-5)


def test_what_is_left_of_a_release_is_the_canary_and_noise():
    """Without any canary it is noise alone, as large as the plan says."""
    private = attach(examples(), "dp-sgd", steps=4, sample_rate=0.7)
    witness, seen = Witness(private, [Batch(*examples(2).tensors)], first=40), []

    def note(release, others, chunks):
        parts = [release.values[n] - others.values[n] for n in others.values]
        seen.append(torch.cat([v.flatten() for v in parts]))
        return np.zeros(2)

    witness._ratios = note
    witness.watch()
    noise = torch.cat(seen) / private.plan.mechanism().noise_std
    assert abs(float(noise.mean())) < 5 / len(noise) ** 0.5
    assert float(noise.std()) == pytest.approx(1, abs=5 / (2 * len(noise)) ** 0.5)


def test_a_run_that_has_begun_is_refused():
    private = attach(examples(), "dp-sgd")
    Witness(private, [Batch(*examples(2).tensors)], first=40).watch()
    with pytest.raises(ConfigurationError, match="begun"):
        Witness(private, [Batch(*examples(2).tensors)], first=40)


# -- every recipe ----------------------------------------------------------------------

PRIVATE = [name for name, recipe in RECIPES.items() if recipe.private]


def test_the_audit_of_dp_sgd_reaches_sixty_percent_of_its_claim():
    """Epsilon 4, T = 10 at rate 0.3; 5000 canaries in 10 runs."""
    size = {"canaries": 500, "runs": 10}
    result = audit_worst_case("dp-sgd", **size, unsafe_reproducible_noise=0)
    assert 0.6 * result.claim.epsilon <= result.epsilon_lower < result.claim.epsilon
    assert result.claim.epsilon == pytest.approx(4.0, abs=0.01)


def test_recipes_stay_below_their_claims():
    size = {"canaries": 100, "runs": 2, "epsilon": 8.0}
    rows = audit_all(["dp-kfc", "dp-sgd-pt"], **size, unsafe_reproducible_noise=0)
    assert [row.recipe for row in rows] == ["dp-kfc", "dp-sgd-pt"]
    assert all(0 <= row.epsilon_lower < row.claim.epsilon for row in rows)
    assert max(row.epsilon_lower for row in rows) > 0


@pytest.mark.slow
def test_every_recipe_stays_below_its_claim_and_the_audit_has_power():
    rows = audit_all(unsafe_reproducible_noise=1)
    assert [row.recipe for row in rows] == PRIVATE
    for row in rows:
        assert 0.4 * row.claim.epsilon < row.epsilon_lower < row.claim.epsilon


@pytest.mark.slow
def test_independent_runs_of_one_pair_stay_below_the_claim_too():
    """Nothing is counted in parallel here: 400 runs, one canary; 22 % measured."""
    result = audit_worst_case(
        "dp-sgd", canaries=1, runs=400, method="runs", expected_batch_size=5.0,
        epsilon=8.0, unsafe_reproducible_noise=0,
    )  # fmt: skip
    assert 0.1 * result.claim.epsilon < result.epsilon_lower < result.claim.epsilon


def test_one_run_proves_something_and_not_too_much():
    result = audit_worst_case(
        "dp-sgd", method="one-run", runs=1, canaries=500, epsilon=8.0,
        unsafe_reproducible_noise=0,
    )  # fmt: skip
    assert 0.5 < result.epsilon_lower < result.claim.epsilon


# -- any model and data ----------------------------------------------------------------


@pytest.mark.parametrize("score", ["white-box", "black-box"])
def test_one_run_on_a_model_of_the_users_own(score, tmp_path):
    own = model()
    before = {n: p.detach().clone() for n, p in own.named_parameters()}
    result = audit(own, "cross-entropy", examples(), canaries=30, score=score, **SMALL)
    assert result.holds
    assert result.found.canaries == 30
    assert all(torch.equal(p, before[n]) for n, p in own.named_parameters())
    stored = json.loads(json.dumps(result.to_json()))
    assert stored["epsilon_lower"] == result.epsilon_lower
    assert stored["steps"] == 3
    assert "epsilon is at least" in str(result)
    assert stored["supposes"] == "nothing"
    assert result.plot(tmp_path / "audit.png").stat().st_size > 5000


def test_runs_with_and_without_a_canary_of_the_users_own():
    seen = []
    canary = (50 * torch.ones(1, 6, 5), torch.tensor(2))
    result = audit(
        model(), "cross-entropy", examples(), method="runs", canaries=[canary],
        runs=24, on_run=lambda *numbers: seen.append(numbers), **{**SMALL, "steps": 2},
    )  # fmt: skip
    assert result.runs == 24 and seen[-1] == (24, 24)
    assert result.holds
    assert result.found.fitted.rates.with_canary == 9  # a quarter chose the threshold
    free, fitted = (Proof(e, 0.0, Rates(5, 9, 0, 9)) for e in (0.42, 1.07))
    more = replace(result, found=Evidence(free, fitted, 0.95), method="parallel")
    assert "with noise of any strength (without that: at least 0.42)" in str(more)
    assert "do not depend on each other" in str(more)
    less = replace(result, found=Evidence(fitted, free, 0.95))
    assert less.to_json()["supposes"] == "nothing"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"canaries": True}, "canaries is True"),
        ({"canaries": 1}, "one run tells several apart"),
        ({"method": "runs", "runs": 10}, "10 runs, half of them"),
        ({"recipe": "noisecurve"}, "depends on the spectrum"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_trained(wrong, said):
    with pytest.raises(ConfigurationError, match=said):
        audit(
            model(), "cross-entropy", examples(), on_run=lambda *_: pytest.fail("ran"),
            **{**SMALL, **wrong},
        )  # fmt: skip


def test_where_the_size_is_public_the_same_mechanism_is_audited():
    settings = {"noise_multiplier": 1.0, "batch_size": 20, "epochs": 1}
    result = audit(model(), "cross-entropy", examples(), canaries=10, **settings)
    assert result.claim.relation.value == "zero-out"
    assert (result.claim.steps, result.claim.sample_rate) == (2, 0.5)


class Pairs(Dataset):
    """Numpy inputs in a dictionary, labels as plain numbers."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"x": np.full(4, index / 30, dtype=np.float32)}, index % 3


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("wrap", [Pairs, lambda: DataLoader(Pairs(), batch_size=5)])
def test_data_of_any_form(wrap):
    result = audit(Keyed(), "cross-entropy", wrap(), canaries=12, **SMALL)
    assert result.holds


def test_replaced_canaries_of_any_form():
    settings = {**SMALL, "relation": "replace-one"}
    result = audit(Keyed(), "cross-entropy", Pairs(), canaries=12, **settings)
    assert result.claim.relation.value == "replace-one"
    assert result.holds


def test_several_results_in_one_picture(tmp_path):
    rows = audit_all(["dp-sgd", "dp-adam"], canaries=40, runs=1)
    assert plot_audits(rows, tmp_path / "all.svg").exists()


# -- refusals --------------------------------------------------------------------------


def test_what_has_no_claim_is_refused():
    for recipe, own in (("non-private", {}), ("dp-kfc", {"probe": "oracle"})):
        with pytest.raises(NotPrivateError):
            audit(model(), "cross-entropy", examples(), recipe, **own, **SMALL)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "many"}, "method"),
        ({"score": "grey"}, "score"),
        ({"runs": 3}, "one run"),
        ({"method": "runs", "canaries": 2}, "looks for one"),
        ({"canaries": []}, "no canary"),
        ({"canaries": 5, "collate_fn": torch.utils.data.default_collate}, "collate"),
        ({"confidence": 1.5}, "confidence"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, match):
    with pytest.raises(ConfigurationError, match=match):
        audit(
            model(), "cross-entropy", examples(), **{"canaries": 4, **options}, **SMALL
        )


def test_replacements_must_be_as_many():
    with pytest.raises(ConfigurationError, match="one for each"):
        Canaries([1, 2], [1])
    with pytest.raises(ConfigurationError, match="Canaries"):
        audit(
            model(), "cross-entropy", TensorDataset(*examples().tensors),
            canaries=[examples()[0]], relation="replace-one", **SMALL,
        )  # fmt: skip
