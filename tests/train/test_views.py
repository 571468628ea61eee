"""Several views of an example: their mean gradient is clipped, as one unit."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer, make_private
from curvedp.errors import CheckpointError, ConfigurationError, DataError
from curvedp.sampling import AUGMENTATIONS
from curvedp.sampling.views import Views

from .test_graph import LOSS, Twin

K, BOUND = 3, 0.5


def examples(n=30):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, 6, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def attach(own=None, dataset=None, **options):
    own = own or net()
    return make_private(
        own,
        torch.optim.SGD(own.parameters(), lr=0.1),
        dataset or examples(),
        loss="cross-entropy",
        **{
            "clip_norm": BOUND,
            "noise_multiplier": 1.0,
            "sample_rate": 0.4,
            "steps": 4,
            "expected_batch_size": 12,
            "physical_batch_size": 14,  # four examples with three views
            "augment": "flips-and-crops",
            "views": K,
            "seed": 5,
            "unsafe_reproducible_noise": 5,
            **options,
        },
    )


def clipped_means(model, x, y, present, bound):
    """One example at a time: mean gradient of its views, clipped, added up."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for unit in range(len(x) // K):
        rows = slice(unit * K, unit * K + K)
        if not present[rows].any():
            continue
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        for t, g in zip(total, gradient, strict=True):
            t += g * (bound / norm).clamp_max(1)
    return total


@pytest.mark.parametrize("bound", [BOUND, 100.0])  # all are cut, and none is
def test_the_mean_gradient_of_the_views_is_clipped(bound):
    private = attach(clip_norm=bound)
    engine, own = private._engine, private.model.module
    expected = None
    for x, y in private.loader:
        assert len(x) == 12
        parts = clipped_means(own, x, y, engine._open.batch.present, bound)
        expected = (
            parts
            if expected is None
            else [a + b for a, b in zip(expected, parts, strict=True)]
        )
        private.loss(private.model(x), y).backward()
        whole = private.batch_is_whole
        engine.accumulate()
        found = engine._open.pending.values.values()
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        if whole:
            engine.release()
            expected = None
    assert private.step == 4


def test_views_are_of_one_example_and_differ():
    private = attach(augment="crops")
    known = {i: set(x.flatten().tolist()) for i, x in enumerate(examples().tensors[0])}
    alike = []
    for x, y in private.loader:
        present = private._engine._open.batch.present
        units = zip(x.split(K), y.split(K), present.split(K), strict=True)
        for rows, labels, there in units:
            assert len(set(labels.tolist())) == len(set(there.tolist())) == 1
            if there[0]:
                pixels = set(rows.flatten().tolist()) - {0.0}
                assert any(pixels <= own for own in known.values())
                alike.append(torch.equal(rows[0], rows[1]))
        private.train_on((x, y))
    assert len(alike) > 20
    assert sum(alike) < 4  # one in 81


def test_one_example_moves_the_sum_by_at_most_the_bound():
    # the same draws and views, with an example as it is and with one that is huge
    sums = []
    for size in (1.0, 1e4):
        data = examples()
        data.tensors[0][7] *= size
        private = attach(dataset=data, sample_rate=1.0, physical_batch_size=90)
        batch = next(iter(private.loader))
        private.loss(private.model(batch[0]), batch[1]).backward()
        private._engine.accumulate()
        values = private._engine._open.pending.values.values()
        sums.append(torch.cat([v.flatten() for v in values]).double())
    assert 0 < float((sums[0] - sums[1]).norm()) <= 2 * BOUND * (1 + 1e-6)


def test_views_of_a_step_are_the_same_after_a_resume(tmp_path):
    whole = attach(run_dir=tmp_path / "whole")
    for batch in whole.loader:
        whole.train_on(batch)
    with attach(run_dir=tmp_path / "halved") as first:
        for batch in first.loader:
            first.train_on(batch)
            if first.step == 2 and first._engine.between_steps:
                break
        first.save()
    second = attach(run_dir=tmp_path / "halved")
    second.resume()
    for batch in second.loader:
        second.train_on(batch)
    pairs = zip(
        whole.model.module.parameters(), second.model.module.parameters(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    whole.save()
    whole.close()
    with (
        attach(run_dir=tmp_path / "whole", views=2) as other,
        pytest.raises(CheckpointError, match="views"),
    ):
        other.resume()


@pytest.mark.parametrize("bound", [BOUND, 100.0])
def test_a_recorded_pass_averages_views_too(bound):
    plain, recorded = attach(clip_norm=bound), attach(clip_norm=bound)
    recorded._passed = recorded._engine.graphed(LOSS, Twin())
    for private in (plain, recorded):
        for batch in private.loader:
            private.train_on(batch)
    pairs = zip(
        plain.model.module.parameters(), recorded.model.module.parameters(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_statement_says_so():
    assert "all its views (3 in a step)" in str(attach().statement())


@pytest.mark.parametrize("recipe", ["dp-kfc", "non-private"])
def test_the_trainer_takes_views(recipe):
    settings = {"probe_size": 8, "probe_batches": 1} if recipe == "dp-kfc" else {}
    trainer = Trainer(
        net(), "cross-entropy", recipe, noise_multiplier=1.0, sample_rate=0.4,
        steps=3, expected_batch_size=12, augment="flips", views=2, **settings,
    )  # fmt: skip
    assert trainer.fit(examples()).steps == 3


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentations_keep_shape_and_draw_from_the_generator_alone(name):
    x = torch.randn(50, 3, 8, 9)

    def view(seed):
        generator = torch.Generator().manual_seed(seed)
        return AUGMENTATIONS[name](x, generator)

    state = torch.random.get_rng_state()
    assert view(0).shape == x.shape
    assert torch.equal(view(0), view(0))
    assert not torch.equal(view(0), view(1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_flips_mirror_about_half_and_crops_move():
    x = torch.randn(400, 1, 4, 5)
    flipped = AUGMENTATIONS["flips"](x, torch.Generator().manual_seed(0))
    same = (flipped == x).flatten(1).all(1)
    assert torch.equal(flipped[~same], x[~same].flip(-1))
    assert 150 < int(same.sum()) < 250
    moved = AUGMENTATIONS["crops"](x, torch.Generator().manual_seed(0))
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    for before, after in zip(padded[:50], moved[:50], strict=True):
        places = [
            (i, j)
            for i in range(9)
            for j in range(9)
            if torch.equal(before[:, i : i + 4, j : j + 5], after)
        ]
        assert places


def test_refusals(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ConfigurationError, match="without an augmentation"):
        attach(augment=None, run_dir=folder)
    with pytest.raises(ConfigurationError, match="unknown augmentation"):
        attach(augment="rotations", run_dir=folder)
    with pytest.raises(ConfigurationError, match="whole number"):
        attach(views=0, run_dir=folder)
    with pytest.raises(ConfigurationError, match="do not go together"):
        attach(people=[i % 10 for i in range(30)], examples_per_person=2,
               run_dir=folder)  # fmt: skip
    with pytest.raises(DataError, match="as many views"):
        attach(augment=lambda x, _: x[:1], run_dir=folder)
    assert not folder.exists()


def test_two_rows_of_inputs_alone_are_not_taken_for_inputs_and_targets():
    views = Views.of(lambda x, generator: x, K, lambda *_: torch.Generator())
    rows = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(views.expand(rows, 0, 0), rows.repeat_interleave(K, 0))
    x, y = views.expand((rows, torch.tensor([0, 1])), 0, 0)
    assert torch.equal(x, rows.repeat_interleave(K, 0))
    assert y.tolist() == [0] * K + [1] * K
