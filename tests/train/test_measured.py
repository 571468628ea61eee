"""Curvature of the private data: bounded, in the same event, and what becomes of it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer
from curvedp.auditing import audit_step
from curvedp.auditing.witness import next_sum
from curvedp.barrier import Provenance
from curvedp.clipping import CurvatureClipping, FlatClipping
from curvedp.clipping.measured import packed, unpacked
from curvedp.errors import CheckpointError, ConfigurationError
from curvedp.probes import OwnLabels
from curvedp.recipes import RECIPES
from curvedp.testing.reference import measured_factor
from curvedp.train import measured
from curvedp.whitening import IdentityWhitener

from .test_graph import graphed
from .test_graph import train as train_graphed
from .test_rivals import DELTA, odd_one_out, without_last
from .test_whitened_recipes import attach as attach_any
from .test_whitened_recipes import examples, flat, model, train

MEASURED = {"probe": "private", "probe_size": 256, "probe_batches": 4}
#: The bound holds up to the rounding of float32 coordinates.
SLACK = 1e-6
OTHERWISE = [float("nan"), float("inf"), 3e38, 1e25, 1e18, 50.0, 1e-3, 1e-30, 0.0]


def attach(dataset, recipe="dp-kfc", own=None, **options):
    return attach_any(dataset, recipe, own, **{**MEASURED, **options})


def joined(pending):
    return torch.cat([v.double().flatten() for v in pending.values.values()])


def length_of(x, y, **options):
    """Of what one example alone adds to the sum, by coordinates; and the bound."""
    data = TensorDataset(x, y)
    pending = next_sum(attach(data, sample_rate=1.0, **options))
    return joined(pending).norm(), pending.bound


# -- the bound ----------------------------------------------------------------------


@pytest.mark.parametrize("side", ["a", "g", "both"])
@pytest.mark.parametrize("clipping", ["flat", "normalised", "per-layer"])
@pytest.mark.parametrize("size", OTHERWISE)
def test_one_example_adds_at_most_the_bound(side, clipping, size):
    x, y = (t[:1].clone() for t in examples().tensors)
    options = {"side": side, "clipping": clipping, "clip_norm": 0.02}
    length, bound = length_of(x * size, y, **options)
    assert length <= bound * (1 + SLACK)
    if not math.isfinite(size):
        assert length == 0


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_a_long_example_uses_all_of_the_bound(share):
    """So that a share that is counted twice, or not at all, shows."""
    x, y = (t[:1].clone() for t in examples().tensors)
    length, bound = length_of(
        x, y, clipping="flat", clip_norm=1e-3, curvature_share=share,
        input_bound=1e-3, own=nn.Sequential(nn.Flatten(), nn.Linear(30, 3)),
    )  # fmt: skip
    assert bound * (1 - 1e-3) < length <= bound * (1 + SLACK)


@pytest.mark.parametrize("size", OTHERWISE)
def test_neighbours_are_at_most_the_bound_apart(size):
    x, y = (t.clone() for t in examples().tensors)
    x[-1] *= size
    data = TensorDataset(x, y)
    options = {"side": "both", "sample_rate": 1.0, "clip_norm": 0.02}
    sums = [next_sum(attach(d, **options)) for d in (data, without_last(data))]
    assert sums[0].frame == sums[1].frame
    distance = (joined(sums[0]) - joined(sums[1])).norm()
    assert distance <= sums[0].bound * (1 + 1e-5)  # of sums over forty in float32
    assert all(bool(v.isfinite().all()) for v in sums[0].values.values())


def test_a_person_adds_at_most_the_bound_however_many_examples():
    x, y = (t.clone() for t in examples(6).tensors)
    data = TensorDataset(x * 20, y)
    people = {"people": ["somebody"] * 6, "examples_per_person": 4}
    private = attach(
        data, sample_rate=1.0, side="both", clip_norm=0.02, **people,
    )  # fmt: skip
    pending = next_sum(private)
    assert 0 < joined(pending).norm() <= pending.bound * (1 + SLACK)


def test_a_slot_without_an_example_has_no_column_of_ones():
    own = nn.Sequential(nn.Flatten(), nn.Linear(30, 3))
    x, y = (t[:1] for t in examples().tensors)
    found = []
    for slots in (1, 4):
        private = attach(
            TensorDataset(x, y), own=own, sample_rate=1.0,
            people=["somebody"], examples_per_person=slots,
        )  # fmt: skip
        found.append(joined(next_sum(private)))
    assert torch.allclose(*found, atol=1e-7)


def test_rounding_over_many_positions_stays_in_the_bound():
    """All terms of an entry have one sign, and nobody else's hide the excess."""
    x = torch.full((1, 1, 3, 20_000), 0.1234567).transpose(2, 3)
    own = nn.Linear(3, 2)
    own = nn.Sequential(own, nn.Tanh(), nn.Flatten(), nn.Linear(40_000, 3))
    length, bound = length_of(
        x, torch.tensor([1]), own=own, leave_out="3", input_bound=1e-3,
        curvature_share=1 - 1e-9, clip_norm=0.5,
    )  # fmt: skip
    assert bound * (1 - 2e-3) < length <= bound * (1 + SLACK)


def test_packing_keeps_lengths_and_comes_back():
    m = torch.randn(3, 5, 5, dtype=torch.float64)
    m = m + m.mT
    assert packed(m).shape == (3, 15)
    assert torch.allclose(packed(m).norm(), m.norm())
    assert torch.allclose(unpacked(packed(m), 5), m)


# -- what is measured ---------------------------------------------------------------


def rows_of(own, layer, x, y):
    """``a`` with a column of ones, where d is not zero; d. One example at a time."""
    module, pairs = own.get_submodule(layer), []
    seen = {}
    handle = module.register_forward_hook(
        lambda _, args, output: seen.update(x=args[0], y=output)
    )
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(own(x[i : i + 1]), y[i : i + 1])
        (d,) = torch.autograd.grad(loss, [seen["y"]])
        a = seen["x"].detach()
        if isinstance(module, nn.Conv2d):
            a = nn.functional.unfold(a, module.kernel_size).mT[0]
            d = d.flatten(2).mT[0]
        a = torch.cat([a, torch.ones(len(a), 1)], 1)
        in_gradient = d.abs().sum(1) > 0
        pairs.append((a[in_gradient], d))
    handle.remove()
    return pairs


@pytest.mark.parametrize("bounds", [1.0, 0.3])
def test_coordinates_are_their_definition(bounds):
    data, own = examples(), model()
    private = attach(
        data, own=own, sample_rate=1.0, side="both", curvature_share=0.3,
        input_bound=bounds, output_bound=bounds, clip_norm=2.0,
    )  # fmt: skip
    pending = next_sum(private)
    rule = private.plan.clipping
    c = 2.0 * math.sqrt(0.3 / 6)
    assert [layer.name for layer in rule.layers] == ["0", "3", "6"]
    for layer in rule.layers:
        pairs = rows_of(own, layer.name, *data.tensors)
        inputs = [bounds**2 * a.numel() for a, _ in pairs]
        wanted = {
            "a": measured_factor([a for a, _ in pairs], inputs, c),
            "g": measured_factor([d for _, d in pairs], [bounds**2] * 40, c),
        }
        for side, matrix in wanted.items():
            found = unpacked(pending.values[layer.key(side)].double(), len(matrix))[0]
            assert torch.allclose(found, matrix, rtol=1e-4, atol=1e-5 * matrix.norm())


def test_groups_of_a_convolution_have_factors_of_their_own():
    torch.manual_seed(0)
    own = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(24, 3))
    x, y = 30 * torch.randn(8, 4, 5), torch.randint(0, 3, (8,))
    private = attach(TensorDataset(x, y), own=own, sample_rate=1.0, side="both")
    pending, layer = next_sum(private), private.plan.clipping.layers[0]
    assert (layer.groups, layer.inputs, layer.outputs) == (2, 5, 3)
    patches = x.unfold(2, 2, 1).transpose(1, 2)  # [8, 4 positions, 4, 2]
    c = math.sqrt(0.2 / 4)
    wanted = torch.zeros(2, 5, 5, dtype=torch.float64)
    for each in patches.double():
        ones = torch.ones(4, 1, dtype=torch.float64)
        halves = [torch.cat([h.flatten(1), ones], 1) for h in each.split(2, 1)]
        moments = torch.stack([h.mT @ h for h in halves])
        trace = float(sum(m.trace() for m in moments))
        wanted += c * moments / max(trace, 4 * 2 * 5)
    found = unpacked(pending.values[layer.key("a")].double(), 5)
    assert torch.allclose(found, wanted, atol=1e-5)


class Masked(nn.Module):
    """Scores of positions, added up where there is a token."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)
        self.table.weight.requires_grad_(False)

    def forward(self, ids):
        scores = self.head(self.table(ids))
        return (scores * (ids > 0).unsqueeze(-1)).sum(1)


def test_padding_that_the_loss_does_not_see_is_not_measured():
    """Or the length of somebody's sequence would be in everybody's factor."""
    torch.manual_seed(0)
    own = Masked()
    ids, y = torch.randint(1, 9, (4, 5)), torch.tensor([0, 1, 2, 0])
    longer = torch.cat([ids, torch.zeros(4, 7, dtype=torch.int64)], 1)
    sums = [
        joined(next_sum(attach(TensorDataset(x, y), own=own, sample_rate=1.0)))
        for x in (ids, longer)
    ]
    assert torch.allclose(*sums, atol=1e-6)


def smooth():
    """Every position has a gradient."""
    own = model()
    own[1] = nn.Tanh()
    return own


def test_without_noise_the_factors_are_the_oracles():
    data = examples()
    options = {
        "sample_rate": 1.0, "expected_batch_size": 40, "steps": 2, "refresh": 1,
        "side": "both", "clip_norm": 1e3,
    }  # fmt: skip
    distances = []
    for noise in (1e-2, 1e-4, 1e-7):
        private = attach(
            data, own=smooth(), noise_multiplier=noise, input_bound=5.0,
            output_bound=5.0, curvature_share=0.5, **options,
        )  # fmt: skip
        oracle = attach_any(
            data, "dp-kfc", smooth(), probe="oracle", labels=OwnLabels(), probe_size=40,
            probe_batches=1, decay=0.5, noise_multiplier=1.0, **options,
        )  # fmt: skip
        train(private, 1)
        private._engine.whiteners.at(1)
        oracle._engine.whiteners.at(0)
        ours = private._engine.whiteners._used.layers
        theirs = oracle._engine.whiteners._factors.layers
        pairs = [
            (getattr(ours[name], side).mean(), getattr(theirs[name], side).mean())
            for name in ours
            for side in "ag"
        ]
        assert len(pairs) == 6
        distances.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    assert distances[0] > 30 * distances[1] > 900 * distances[2]
    assert distances[2] < 1e-3


# -- the run ------------------------------------------------------------------------


def test_the_statement_keeps_its_epsilon_and_says_what_was_measured():
    private = attach(examples(), unsafe_reproducible_noise=None)
    plain = attach_any(examples(), "dp-kfc", unsafe_reproducible_noise=None)
    assert private._engine.whiteners.provenance is Provenance.RELEASED
    train(private, 4)
    facts = private.statement().facts
    assert facts["private"]
    assert facts["epsilon"] == plain.statement().facts["epsilon"]
    assert facts["clipping"]["curvature_share"] == 0.2
    assert "measured on the private data" in str(private.statement())
    assert private.epsilon() == plain.plan.epsilon(4)


def test_the_map_is_the_identity_first_and_changes_at_declared_steps():
    private = attach(examples())
    frames = [private._engine.whiteners.at(0).frame]
    assert frames[0] == IdentityWhitener().frame
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if len(frames) <= private.step:
            frames.append(private._engine.whiteners.at(private.step).frame)
    changes = [i for i in range(1, 9) if frames[i] != frames[i - 1]]
    assert changes == [3, 6]


@pytest.mark.parametrize("recipe", ["dp-kfc", "dp-ngd"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
@pytest.mark.parametrize("saved", [True, False])
def test_a_resumed_run_ends_with_the_same_bits(recipe, decay, stop, saved, tmp_path):
    options = {"recipe": recipe, "decay": decay}
    whole = train(attach(examples(), **options))
    with attach(examples(), **options, run_dir=tmp_path / "run") as first:
        first.save()
        train(first, stop)
        if saved:
            first.save()  # otherwise the journal brings the steps
    with attach(examples(), **options, run_dir=tmp_path / "run") as second:
        second.resume()
        assert second.step == stop
        assert torch.equal(train(second), whole)


def test_a_moving_average_remembers():
    ends = [train(attach(examples(), decay=decay)) for decay in (0.0, 0.9)]
    assert not torch.equal(*ends)


@pytest.mark.parametrize("recipe", ["dp-kfc", "dp-ngd"])
def test_a_recorded_run_is_the_same_to_the_bit(recipe):
    data = examples()
    data.tensors[0][5] = float("nan")
    data.tensors[0][6] = float("inf")
    data.tensors[0][7] = 1e25
    _, weights = train_graphed(attach(data, recipe))
    private, twin = graphed(attach(data, recipe))
    _, recorded = train_graphed(private)
    assert all(torch.equal(a, b) for a, b in zip(weights, recorded, strict=True))
    assert 1 <= twin.count <= 3


@pytest.mark.parametrize(
    "options",
    [
        {"secure": True, "unsafe_reproducible_noise": None},
        {"augment": "flips", "views": 2},
        {"clip_order": "before", "back_map": "natural"},
        {"side": "both", "rank": 0, "product": True, "match_scale": True},
    ],
    ids=str,
)
def test_it_goes_with(options):
    if options.get("secure"):
        pytest.importorskip("cryptography")
    private = attach(examples(), **options)
    assert bool(train(private).isfinite().all())
    assert private._engine.whiteners.at(private.step).frame != "identity"


@pytest.mark.parametrize("recipe", ["dp-kfc+adambc", "dp-kfc+disk"])
def test_recipes_with_transforms_take_it(recipe):
    assert bool(train(attach(examples(), recipe)).isfinite().all())


def test_a_trainer_takes_it():
    trainer = Trainer(
        model(), "cross-entropy", "dp-kfc", noise_multiplier=1.0, sample_rate=0.5,
        steps=3, expected_batch_size=20, seed=1, probe="private", refresh=1,
    )  # fmt: skip
    assert trainer.fit(examples()).steps == 3


def test_the_claim_holds_against_an_audit():
    """Two neighbours with one past, before and after a map was learnt."""
    options = {
        "sample_rate": 1.0, "delta": DELTA, "noise_multiplier": 1.5,
        "clip_norm": 0.02, "allow_large_delta": True, "input_bound": 0.1,
        "curvature_share": 0.5,
    }  # fmt: skip
    data = odd_one_out()
    for steps in (0, 4):
        with_it = attach(data, **options)
        without = attach(without_last(data), **options)
        if steps:
            train(with_it, steps)
            without.load_state_dict(with_it.state_dict())
        sums = [next_sum(without), next_sum(with_it)]
        assert sums[0].frame == sums[1].frame
        assert (sums[0].frame == IdentityWhitener().frame) == (steps == 0)
        one_step = with_it.plan.epsilon(1)
        found = audit_step(
            with_it._engine.noise.mechanism, sums, DELTA, unsafe_reproducible_noise=0
        )
        assert found.epsilon_lower <= one_step
        assert found.epsilon_estimated > 0.8 * one_step


# -- refusals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"refresh": 0}, "refresh"),
        ({"diagonal": True}, "diagonal"),
        ({"probe_size": 3}, "probe_size"),
        ({"curvature_share": 1.0}, "curvature_share"),
        ({"curvature_share": 0.0}, "curvature_share"),
        ({"input_bound": 0.0}, "input_bound"),
        ({"output_bound": float("nan")}, "output_bound"),
        ({"clipping": "adaptive"}, "adaptive"),
        ({"probe": "synthetic", "curvature_share": 0.5}, "curvature_share"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_it_are_refused(settings, match):
    with pytest.raises(ConfigurationError, match=match):
        RECIPES["dp-kfc"].configure(**{"probe": "private", **settings}).clipping_rule()


def test_a_wide_layer_is_refused_by_name_and_can_be_left_out(monkeypatch):
    monkeypatch.setattr(measured, "LARGEST_SIDE", 40)
    with pytest.raises(ConfigurationError, match=r"(?s)'3'.*49 rows.*leave_out"):
        attach(examples())
    for recipe in ("dp-kfc", "dp-ngd"):
        private = attach(examples(), recipe, leave_out="3")
        assert [layer.name for layer in private.plan.clipping.layers] == ["0", "6"]
        train(private, 4)


def test_a_model_without_dense_layers_is_refused():
    own = nn.Sequential(nn.Flatten(), nn.LayerNorm(30))
    with pytest.raises(ConfigurationError, match="no linear layer"):
        attach(examples(), own=own)


def test_a_map_needs_the_releases_before_it():
    with pytest.raises(CheckpointError, match="step 4"):
        attach(examples())._engine.whiteners.at(4)


def test_a_rule_with_another_bound_is_refused():
    with pytest.raises(ConfigurationError, match="another bound"):
        CurvatureClipping(1.0, FlatClipping(2.0), 0.5)


def test_inputs_are_kept_of_measured_layers_alone():
    private = attach(examples(), leave_out="0")
    assert private.plan.clipping.measured_sites == {"3", "6"}
    assert flat(private.model).numel()
