"""Recipes that act after the noise: a run against its formula, settings, refusals."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import RECIPES, Recipe, Trainer, make_private
from curvedp.errors import CheckpointError, ConfigurationError
from curvedp.experiments import RunConfig
from curvedp.recipes import disk, dp_kfc_disk
from curvedp.testing import reference
from curvedp.update import (
    AdamBC,
    Chain,
    ExponentialAverage,
    Gradient,
    Momentum,
    TailAverage,
)
from curvedp.update import Transform as BaseTransform

STEPS = 7
PROBES = {"probe_size": 16, "probe_batches": 1, "refresh": 3}


def examples(n=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


def attach(recipe, own=None, **options):
    own = own or net()
    return make_private(
        own,
        recipe.make_optimiser(own.parameters()),
        examples(),
        recipe=recipe,
        loss="cross-entropy",
        noise_multiplier=1.0,
        sample_rate=0.5,
        steps=STEPS,
        expected_batch_size=20,
        seed=3,
        unsafe_reproducible_noise=7,
        **options,
    )


def recorded_run(recipe):
    """Releases ``[T, all]``, the whitener's matrices, and the parameters after each."""
    private = attach(recipe)
    engine, releases, matrices, iterates = private._engine, [], [], []
    apply = engine.apply

    def watched(release):
        like = dict(engine.parameters)
        matrices.append(engine.whiteners.at(release.step).materialize(like).double())
        releases.append(flat(release.values.values()))
        apply(release)
        iterates.append(flat(p.detach() for p in engine.parameters.values()))

    engine.apply = watched
    start = flat(p.detach() for p in engine.parameters.values()).clone()
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
    moves = torch.stack([start, *iterates]).diff(dim=0)
    return torch.stack(releases), matrices, moves


def flat(values):
    return torch.cat([v.double().flatten() for v in values])


CASES = [
    ("dp-adambc", {}),
    ("dp-adambc", {"beta1": 0.5, "beta2": 0.9, "floor": 1e-4}),
    ("dp-kfc+adambc", {**PROBES}),
    ("dp-kfc+adambc", {**PROBES, "back_map": "natural", "side": "both", "beta2": 0.9}),
    ("dp-kfc+adambc", {**PROBES, "back_map": "inverse", "floor": 1e-4}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_a_run_is_the_formula_on_its_releases(name, settings):
    """Whitener, refresh and noise as they were; AdamBC written out, by coordinate."""
    recipe = RECIPES[name].configure(**settings, learning_rate=0.01)
    releases, matrices, moves = recorded_run(recipe)
    back_map = "none" if recipe.curvature is None else recipe.curvature.back_map
    noise_std = recipe.clip_norm / 20
    seen, noises = [], []
    for release, matrix in zip(releases, matrices, strict=True):
        back = {"none": torch.eye(len(matrix)).double(), "natural": matrix.T}
        back["inverse"] = torch.linalg.inv(matrix)
        seen.append((back[back_map] @ (release / 20)).tolist())
        noises.append(reference.mapped_variances(back[back_map], noise_std**2))
    rule = recipe.chain.transforms[0]
    for j in range(releases.shape[1]):
        expected = reference.adambc(
            [row[j] for row in seen],
            [row[j] for row in noises],
            rule.beta1,
            rule.beta2,
            rule.floor,
        )
        found = (-moves[:, j] / 0.01).tolist()
        usual = max(abs(x) for x in expected)
        for a, b in zip(found, expected, strict=True):
            # differences of float32 parameters, whose rounding is divided by the rate
            assert abs(a - b) <= 1e-4 * usual + 2e-5


def test_scale_then_privatise_maps_back():
    recipe = RECIPES["dp-stp"].configure(**PROBES, momentum=0.0, learning_rate=0.5)
    assert (recipe.curvature.exponent, recipe.curvature.back_map) == (0.25, "inverse")
    releases, matrices, moves = recorded_run(recipe)
    for release, matrix, move in zip(releases, matrices, moves, strict=True):
        expected = -0.5 * torch.linalg.solve(matrix, release / 20)
        assert torch.allclose(move, expected, atol=1e-5)
    assert not torch.allclose(matrices[0], matrices[-1])  # refreshed between


# -- settings --------------------------------------------------------------------------


def test_fields_of_transforms_are_settings_of_the_recipe():
    recipe = RECIPES["dp-kfc+adambc"]
    assert {"beta1", "beta2", "floor", "damping", "clip_norm"} <= set(
        recipe.setting_names()
    )
    changed = recipe.configure(beta2=0.99, damping=0.2, clip_norm=2.0)
    assert changed.chain == Chain((AdamBC(beta2=0.99),))
    assert changed.curvature.damping == 0.2
    facts = changed.facts()
    assert (facts["beta2"], facts["damping"], facts["clip_norm"]) == (0.99, 0.2, 2.0)
    assert recipe.chain == Chain((AdamBC(),))  # the original is as it was
    given = {"floor": 1e-6, "beta1": 0.5}
    config = RunConfig("digits", recipe="dp-adambc", recipe_settings=given)
    assert config.configured_recipe().chain == Chain((AdamBC(0.5, floor=1e-6),))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"beta2": 1.0}, "beta2"),
        ({"floor": "small"}, "floor"),
        ({"floor": -1e-8}, "floor"),
        ({"beta1": True}, "beta1"),
        ({"kappa": 0.5}, "kappa"),
    ],
)
def test_settings_of_transforms_are_checked_by_name(settings, match):
    with pytest.raises(ConfigurationError, match=match):
        RECIPES["dp-adambc"].configure(**settings)


@pytest.mark.parametrize("name", ["dp-adam", "dp-adamw"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_momentum_is_the_beta1_of_adam_and_none_is_zero(name, momentum):
    """Not torch's own default of 0.9, which nobody asked for."""
    recipe = RECIPES[name].configure(momentum=momentum)
    optimiser = recipe.make_optimiser(net().parameters())
    assert optimiser.defaults["betas"] == (momentum, 0.999)


def test_the_trainer_takes_them():
    trainer = Trainer(
        net(), "cross-entropy", "dp-adambc", beta2=0.9, noise_multiplier=1.0,
        sample_rate=0.5, steps=2, expected_batch_size=20,
    )  # fmt: skip
    assert trainer.recipe.facts()["beta2"] == 0.9
    assert trainer.fit(examples()).steps == 2


@dataclass(frozen=True)
class Scaled(BaseTransform):
    learning_rate: float = 1.0

    def init(self, parameters):
        return {}

    def update(self, gradient, state):
        scaled = {n: self.learning_rate * g for n, g in gradient.values.items()}
        return Gradient(scaled), state


def test_a_setting_has_one_meaning():
    with pytest.raises(ConfigurationError, match="two settings called learning_rate"):
        Recipe(name="mine", summary="", chain=Chain((Scaled(),)))
    twice = Chain((Momentum(0.5), Momentum(0.2)))
    assert twice.facts() == {
        "mu": 0.5, "nesterov": False, "mu_2": 0.2, "nesterov_2": False,
    }  # fmt: skip
    recipe = Recipe(name="mine", summary="", chain=twice).configure(mu_2=0.7)
    assert recipe.chain == Chain((Momentum(0.5), Momentum(0.7)))
    with pytest.raises(ConfigurationError, match="nesterov_2"):
        recipe.configure(nesterov_2=1)


def test_transforms_can_be_added_to_any_recipe():
    recipe = RECIPES["dp-kfc+adambc"].then(ExponentialAverage(0.5))
    assert recipe.chain == Chain((AdamBC(), ExponentialAverage(0.5)))
    private = attach(recipe.configure(**PROBES, average_decay=0.0))
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
    engine = private._engine
    average = engine._chain.averaged(engine.chain_state)
    for name, p in engine.parameters.items():  # without memory, the last ones
        assert torch.equal(average[name], p.detach())


@pytest.mark.parametrize("kappa", [0.3, 0.7])
def test_disk_clips_gradients_that_are_taken_ahead(kappa):
    recipe = RECIPES["disk"].configure(kappa=kappa, clip_norm=0.5)
    private = attach(recipe, physical_batch_size=40)
    engine, own = private._engine, private.model.module
    before = [p.detach().clone() for p in own.parameters()]
    seen = []
    mechanism = engine.noise.mechanism
    update = type(mechanism).update
    watched = lambda m, clipped, state: (  # noqa: E731
        seen.append(flat(clipped.values.values())), update(m, clipped, state)
    )[1]  # fmt: skip
    try:
        type(mechanism).update = watched
        for batch in private.loader:
            present = engine._open.batch.present
            now = [p.detach().clone() for p in own.parameters()]
            gamma = (1 - kappa) / kappa
            ahead = [x + gamma * (x - y) for x, y in zip(now, before, strict=True)]
            expected = clipped_at(own, ahead, batch, present, 0.5)
            private.train_on(batch)
            assert torch.allclose(seen[-1], expected, rtol=1e-4, atol=1e-5)
            before = now
    finally:
        type(mechanism).update = update
    assert len(seen) == STEPS


def clipped_at(model, point, batch, present, bound):
    """Sum of clipped gradients, one example at a time, at other parameters."""
    names = [n for n, _ in model.named_parameters()]
    total = 0.0
    for x, y, there in zip(*batch, present, strict=True):
        leaves = [p.clone().requires_grad_() for p in point]
        values = dict(zip(names, leaves, strict=True))
        out = torch.func.functional_call(model, values, (x[None],))
        loss = nn.functional.cross_entropy(out, y[None])
        gradient = flat(torch.autograd.grad(loss, leaves))
        if there:
            total = total + gradient * min(1.0, bound / float(gradient.norm()))
    return total


@pytest.mark.parametrize("page", [disk, dp_kfc_disk])
def test_two_gradients_are_refused_before_anything_is_paid(page, tmp_path):
    assert {"kappa", "gamma"} <= set(page.RECIPE.setting_names())
    with pytest.raises(ConfigurationError, match="two gradients of every example"):
        attach(page.RECIPE.configure(gamma=2.0), run_dir=tmp_path / "run")
    attach(page.RECIPE.configure(kappa=1.0), run_dir=tmp_path / "other").close()


def test_settings_of_transforms_are_keywords_and_facts(tmp_path):
    private = attach(RECIPES["dp-adambc"], beta2=0.9, run_dir=tmp_path / "run")
    assert private._recipe.chain.facts()["beta2"] == 0.9
    private.save()
    private.close()
    with (
        attach(RECIPES["dp-adambc"], beta2=0.8, run_dir=tmp_path / "run") as other,
        pytest.raises(CheckpointError, match="transforms"),
    ):
        other.resume()


def test_the_average_of_the_iterates_is_the_users():
    private = attach(RECIPES["dp-sgd"].then(TailAverage(0)))
    iterates = []
    for batch in private.loader:
        private.train_on(batch)
        iterates.append(flat(p.detach() for p in private.model.module.parameters()))
    found = flat(private.averaged_parameters().values())
    assert torch.allclose(found, torch.stack(iterates).mean(0), atol=1e-6)
    assert attach(RECIPES["dp-sgd"]).averaged_parameters() is None
