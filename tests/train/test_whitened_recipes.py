"""Recipes that whiten, end to end: neighbours, refresh, resume, back-maps, oracle."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer, make_private
from curvedp.errors import ConfigurationError, NotPrivateError
from curvedp.probes import OracleProbe, PublicProbe
from curvedp.recipes import RECIPES
from curvedp.whitening import IdentityWhitener

WHITENING = [name for name, recipe in RECIPES.items() if recipe.curvature is not None]
PRIVATE = [name for name, recipe in RECIPES.items() if recipe.private]
SETTINGS = {"probe_size": 16, "probe_batches": 2, "refresh": 3}
#: Recipes that whiten, and maps of dp-kfc that are made in another way.
MAPS = [*((name, {}) for name in WHITENING), ("dp-kfc", {"diagonal": True})]


def examples(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 6, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def model():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.Tanh(),
        nn.LayerNorm(5), nn.Linear(5, 3),
    )  # fmt: skip


def attach(dataset, recipe, own=None, **options):
    own = own or model()
    settings = SETTINGS if RECIPES[recipe].probes else {}
    if recipe in WHITENING:
        settings = {**settings, "refresh": 3}
    if RECIPES[recipe].correlation is not None:
        # everybody in every step leaves no second group to take turns with, and three
        # steps of one whitener leave nothing for a second band to cancel
        alone = options.get("sample_rate") == 1.0 or recipe in WHITENING
        settings = {**settings, "bands": 1 if alone else 2}
    if RECIPES[recipe].eigenvalues is not None:
        settings = {**settings, "spectrum_size": 8, "spectrum_top": 20}
    if RECIPES[recipe].pretrains:
        public = PublicProbe(examples(60, seed=9))
        settings = {"probes": public, "pretrain_epochs": 1, "pretrain_batch_size": 20}
    return make_private(
        own,
        torch.optim.SGD(own.parameters(), lr=0.05),
        dataset,
        recipe=recipe,
        loss="cross-entropy",
        **{
            "noise_multiplier": 1.0,
            "sample_rate": 0.5,
            "steps": 8,
            "expected_batch_size": 20,
            "physical_batch_size": 8,
            "seed": 3,
            "unsafe_reproducible_noise": 7,
            **settings,
            **options,
        },
    )


def train(private, steps=None):
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if steps is not None and private.step >= steps:
            break
    return flat(private.model)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_there_are_such_recipes():
    assert {"dp-kfc", "dp-ngd"} <= set(WHITENING)


@pytest.mark.parametrize(
    ("recipe", "own"), [*((name, {}) for name in PRIVATE), MAPS[-1]]
)
def test_neighbours_have_one_whitener_and_sums_at_most_the_bound_apart(recipe, own):
    """The same seeds, one example more; every recipe, first step."""
    whole = examples()
    x, y = (t.clone() for t in whole.tensors)
    x[-1] *= 50
    sums, frames, bounds = [], [], []
    for n in (40, 39):
        private = attach(TensorDataset(x[:n], y[:n]), recipe, sample_rate=1.0, **own)
        engine = private._engine
        for xb, yb in private.loader:
            private.loss(private.model(xb), yb).backward()
            if engine.accumulate():
                break
        pending = engine._open.pending
        sums.append(torch.cat([v.flatten() for v in pending.values.values()]))
        frames.append(pending.frame)
        bounds.append(pending.bound)
    assert frames[0] == frames[1]
    assert (frames[0] != IdentityWhitener().frame) == (recipe in WHITENING)
    distance = float((sums[0] - sums[1]).double().norm())
    assert 0 < distance <= bounds[0] * (1 + 1e-5)


@pytest.mark.parametrize("recipe", WHITENING)
def test_the_whitener_changes_at_declared_steps_only(recipe):
    # a floor that moves makes a map of every step: test_moving_floor.py
    own = {"floor_base": 1.0} if RECIPES[recipe].curvature.moves else {}
    private = attach(examples(), recipe, **own)
    frames = []
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if len(frames) < private.step:
            frames.append(private._engine.whiteners.at(private.step - 1).frame)
    assert len(frames) == 8
    changes = [i for i in range(1, 8) if frames[i] != frames[i - 1]]
    assert changes == [3, 6]


@pytest.mark.parametrize(("recipe", "own"), MAPS)
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_run_ends_with_the_same_bits(recipe, own, decay, stop, tmp_path):
    own = {**own, "decay": decay}
    whole = train(attach(examples(), recipe, **own))
    with attach(examples(), recipe, **own, run_dir=tmp_path / "run") as first:
        first.save()
        train(first, stop)
        if stop != 4:
            first.save()  # otherwise the journal brings the steps
    with attach(examples(), recipe, **own, run_dir=tmp_path / "run") as second:
        second.resume()
        assert second.step == stop
        assert torch.equal(train(second), whole)


def test_back_maps_are_what_they_say():
    """Without noise to speak of, and one step: P g, P^T P g and g."""
    found = {}
    for back_map in ("none", "natural", "inverse"):
        own = model()
        before = {n: p.detach().clone() for n, p in own.named_parameters()}
        private = attach(
            examples(), "dp-kfc", own, back_map=back_map, noise_multiplier=1e-4,
            clip_norm=1e4, clipping="flat", steps=1,
        )  # fmt: skip
        whitener = private._engine.whiteners.at(0)
        train(private)
        moved = {n: before[n] - p.detach() for n, p in own.named_parameters()}
        found[back_map] = (moved, whitener)
    plain, whitener = found["inverse"]
    once = whitener.apply(plain)
    twice = whitener.adjoint(once)
    for name in plain:
        assert torch.allclose(found["none"][0][name], once[name], atol=2e-2)
        assert torch.allclose(found["natural"][0][name], twice[name], atol=5e-2)


def test_an_oracle_has_no_guarantee_and_prints_no_epsilon(tmp_path):
    private = attach(
        examples(), "dp-kfc", probe="oracle", unsafe_reproducible_noise=None,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    train(private, 2)
    statement = private.statement()
    assert "NO PRIVACY GUARANTEE" in str(statement)
    assert not statement.facts["private"]
    assert statement.facts["epsilon"] is None
    assert statement.facts["epsilon_spent"] is None
    with pytest.raises(NotPrivateError, match="private data"):
        private.epsilon()
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert any("oracle" in json.dumps(json.loads(line)) for line in lines)


def test_a_probe_of_private_data_is_refused_without_the_word():
    with pytest.raises(ConfigurationError, match="oracle"):
        attach(examples(), "dp-kfc", probes=OracleProbe(examples()))


def test_public_data_takes_the_place_of_synthetic_probes():
    with pytest.raises(ConfigurationError, match="no public data"):
        attach(examples(), "dp-kfc", probe="public")
    public = PublicProbe(examples(60, seed=9))
    private = attach(examples(), "dp-kfc", probe="public", probes=public, labels=None)
    train(private, 1)
    other = attach(examples(), "dp-kfc")
    train(other, 1)
    frames = [p._engine.whiteners.at(0).frame for p in (private, other)]
    assert frames[0] != frames[1]


def test_curvature_needs_the_loss():
    own = model()
    with pytest.raises(ConfigurationError, match="loss"):
        make_private(
            own, torch.optim.SGD(own.parameters(), lr=0.1), examples(),
            recipe="dp-kfc", noise_multiplier=1.0, sample_rate=0.5, steps=2,
            expected_batch_size=20,
        )  # fmt: skip


def test_a_diagonal_map_is_another_one():
    frames = [
        attach(examples(), "dp-kfc", diagonal=diagonal)._engine.whiteners.at(0).frame
        for diagonal in (False, True)
    ]
    assert frames[0] != frames[1]


@pytest.mark.parametrize("mode", ["default", "paper", "official"])
def test_modes_train(mode):
    trainer = Trainer(
        model(), "cross-entropy", "dp-kfc", mode=mode, noise_multiplier=1.0,
        sample_rate=0.5, steps=3, expected_batch_size=20, seed=1, probe_size=16,
    )  # fmt: skip
    assert trainer.fit(examples()).steps == 3


def test_the_mode_paper_is_the_papers():
    facts = RECIPES["dp-kfc"].configure(mode="paper").facts()
    stated = {
        "optimiser": "sgd", "momentum": 0.9, "learning_rate": 1e-3,  # appendix H, CNNs
        "clipping": "flat", "side": "both", "exponent": 0.5, "back_map": "none",
        "absolute_damping": True, "damping": 0.011,  # algorithm 1, pi and gamma
        "spectral_power": 1.0,  # eq. 2, of the power spectrum
        "labels": "uniform", "probe_batches": 10, "refresh": 50,
    }  # fmt: skip
    assert {name: facts[name] for name in stated} == stated


def test_unknown_modes_and_settings_are_refused_by_name():
    recipe = RECIPES["dp-kfc"]
    with pytest.raises(ConfigurationError, match="'papr'"):
        recipe.configure(mode="papr")
    with pytest.raises(ConfigurationError, match="sied"):
        recipe.configure(sied="a")
    with pytest.raises(ConfigurationError, match="side"):
        recipe.configure(side="left")
    with pytest.raises(ConfigurationError, match="side"):
        RECIPES["dp-sgd"].configure(side="a")
    assert recipe.configure(side="both").facts()["side"] == "both"


@pytest.mark.parametrize("recipe", WHITENING)
def test_the_statement_of_a_synthetic_run_is_private(recipe):
    private = attach(examples(), recipe, unsafe_reproducible_noise=None)
    assert private.statement().facts["private"]


@pytest.mark.parametrize("own", [{}, {"diagonal": True}], ids=str)
def test_tokens_and_features_have_synthetic_probes(own):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

        def forward(self, ids):
            return self.head(self.table(ids).mean(1))

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (40,), generator=generator)

    def kind_of_probe(x, own_model):
        private = attach(TensorDataset(x, labels), "dp-kfc", own_model, **own)
        train(private, 2)
        assert private.step == 2
        return private._engine.whiteners._how.probe.describe()["kind"]

    tokens = torch.randint(0, 20, (40, 7), generator=generator)
    assert kind_of_probe(tokens, Tagger()) == "tokens"
    rows = torch.randn(40, 9, generator=generator)
    assert kind_of_probe(rows, nn.Linear(9, 3)) == "features"
    signals = torch.randn(40, 2, 9, generator=generator)
    signal_model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(21, 3))
    assert kind_of_probe(signals, signal_model) == "images"


def test_an_oracle_in_an_earlier_sitting_is_not_forgotten(tmp_path):
    options = {"unsafe_reproducible_noise": None, "run_dir": tmp_path / "run"}
    with attach(examples(), "dp-kfc", probe="oracle", **options) as first:
        first.save()
        train(first, 2)
    with attach(examples(), "dp-kfc", **options) as second:
        assert not second.statement().facts["private"]
        assert second.statement().facts["epsilon"] is None
        with pytest.raises(NotPrivateError):
            second.epsilon()


def test_the_statement_names_public_data_as_unprotected():
    public = PublicProbe(examples(60, seed=9))
    private = attach(examples(), "dp-kfc", probe="public", probes=public)
    assert any("declared public" in c for c in private.statement().caveats)
