"""How much noise the optimiser sees, and that AdamBC takes just that away."""

from functools import partial

import pytest
import torch

from curvedp.barrier import IDENTITY_FRAME
from curvedp.clipping import AdaptiveClipping, FlatClipping
from curvedp.clipping.adaptive import COUNT
from curvedp.curvature import SecondMoment
from curvedp.errors import ConfigurationError
from curvedp.noise import restore_release
from curvedp.testing import reference
from curvedp.update import (
    AdamBC,
    Chain,
    Gradient,
    KalmanFilter,
    Momentum,
    apply_release,
    noise_variance,
    read_out,
)
from curvedp.whitening import (
    Damping,
    DiagonalMap,
    IdentityMap,
    IdentityWhitener,
    JointMap,
    KroneckerMap,
    LayerwiseWhitener,
    damped_root,
)
from curvedp.whitening.roots import DiagonalRoot, IdentityRoot, ProductRoot

BATCH, STD = 16.0, 3.0
VARIANCE = (STD / BATCH) ** 2


# -- variances through the back-map ----------------------------------------------------


def moment(n, groups=1, seed=0):
    """Of rows whose scales differ a hundredfold."""
    generator = torch.Generator().manual_seed(seed + n)
    x = torch.randn(groups, 3 * n, n, generator=generator, dtype=torch.float64)
    return SecondMoment.of(x * torch.logspace(0, -2, n), 3.0 * n)


def whitener():
    """Every map and every root on one made-up model; parameters beside it."""
    half, quarter = Damping(0.01), Damping(0.05)
    shape = {"full.w": (5, 4), "full.b": (5,), "low.w": (6, 7), "conv.w": (4, 2, 2, 2)}
    shape |= {"conv.b": (4,), "table.w": (9, 3), "joint.w": (4, 5), "thin.w": (6, 5)}
    shape |= {"norm.w": (3,), "tied.w": (2, 2)}
    left, right = (
        damped_root(moment(5), 0.5, half),
        damped_root(moment(5, 1, 1), 0.25, half),
    )
    sizes = {n: torch.Size(s) for n, s in shape.items()}
    channel, place = (
        damped_root(moment(2, 2), 0.5, half),
        damped_root(moment(4, 2), 0.5, half),
    )
    product = ProductRoot(channel, place, 4, torch.tensor([0.5, 2.0]).double())
    eigen = {n: torch.linalg.eigh(moment(n).mean()) for n in (4, 5, 6)}
    thin = [eigen[n][1][..., -3:] for n in (5, 6)]
    values = [eigen[n][0][..., -3:] for n in (5, 6)]
    maps = [
        KroneckerMap("full.w", "full.b", sizes["full.w"], 1, left, right, 1.7),
        KroneckerMap(
            "low.w", None, sizes["low.w"], 2, IdentityRoot(),
            damped_root(moment(7, 2), 0.5, quarter, rank=3),
        ),
        KroneckerMap(
            "conv.w", "conv.b", sizes["conv.w"], 2,
            damped_root(moment(2, 2, 5), 0.5, half), product,
        ),
        KroneckerMap(
            "table.w", None, sizes["table.w"], 1,
            DiagonalRoot(torch.logspace(-1, 1, 9, dtype=torch.float64)),
            damped_root(moment(3), 0.5, half),
        ),
        JointMap(
            "joint.w", None, sizes["joint.w"], 1, eigen[5][1], eigen[5][0], eigen[4][1],
            eigen[4][0], 0.0,
        ),
        JointMap(
            "thin.w", None, sizes["thin.w"], 1, thin[0], values[0], thin[1], values[1],
            0.02,
        ),
        DiagonalMap({"norm.w": torch.tensor([0.2, 1.0, 5.0])}),
        IdentityMap(("tied.w",)),
    ]  # fmt: skip
    parameters = {n: torch.zeros(s, dtype=torch.float64) for n, s in shape.items()}
    return LayerwiseWhitener(maps, parameters), parameters


@pytest.mark.parametrize("back_map", ["none", "natural", "inverse"])
def test_the_variance_of_every_coordinate_is_that_of_the_written_down_map(back_map):
    found, parameters = whitener()
    matrix = found.materialize(parameters).double()
    back = {
        "none": torch.eye(len(matrix)),
        "natural": matrix.T,
        "inverse": torch.linalg.inv(matrix),
    }[back_map]
    white = {n: torch.tensor(VARIANCE, dtype=torch.float64) for n in parameters}
    gradient = read_out(Gradient(parameters, white), found, back_map)
    mine = torch.cat(
        [
            gradient.noise_variance[n].expand(p.shape).flatten()
            for n, p in parameters.items()
        ]
    )
    expected = torch.tensor(reference.mapped_variances(back, VARIANCE))
    assert torch.allclose(mine.double(), expected.double(), rtol=1e-6, atol=0)
    assert read_out(Gradient(parameters), found, back_map).noise_variance is None


@pytest.mark.parametrize("back_map", ["natural", "inverse"])
def test_a_map_without_whitening_leaves_the_noise(back_map):
    values = {"w": torch.zeros(2, 3)}
    white = {"w": torch.tensor(VARIANCE)}
    found = read_out(Gradient(values, white), IdentityWhitener(), back_map)
    assert torch.allclose(found.noise_variance["w"], torch.full((2, 3), VARIANCE))


def test_noise_that_is_not_white_is_not_followed_through_a_map():
    found, parameters = whitener()
    noise = {n: torch.tensor(float(i)) for i, n in enumerate(parameters)}
    with pytest.raises(ConfigurationError, match="differs between parameters"):
        read_out(Gradient(parameters, noise), found, "natural")


# -- variances of a release ------------------------------------------------------------


def test_the_mean_has_the_noise_of_the_sum_divided_by_the_batch():
    release = restore_release({"w": torch.ones(3)}, IDENTITY_FRAME, 0, noise_std=STD)
    found = noise_variance(release, FlatClipping(1.0), BATCH)
    assert float(found["w"]) == pytest.approx(VARIANCE)


def test_an_adaptive_threshold_scales_the_noise_too():
    rule = AdaptiveClipping.start(1.0).at(0.25)
    values = {"w": torch.ones(3), COUNT: torch.tensor(2.0)}
    release = restore_release(values, IDENTITY_FRAME, 0, noise_std=STD)
    found = noise_variance(release, rule, BATCH)
    assert found.keys() == {"w"}
    assert float(found["w"]) == pytest.approx(VARIANCE / 16)
    read, _ = rule.read(values, BATCH)
    assert torch.allclose(read["w"], torch.full((3,), 0.25))


# -- AdamBC takes the noise away, and nothing else -------------------------------------

GROUPS, ROWS, COLUMNS = 3000, 3, 4


def small_map(groups):
    """The same map on every group: many groups are many trials of a coordinate."""

    def root(n, seed):
        one = damped_root(moment(n, 1, seed), 0.5, Damping(0.03))
        shared = [t.expand(groups, *t.shape[1:]) for t in one.tensors().values()]
        return type(one)(*shared)

    shape = torch.Size((groups * ROWS, COLUMNS))
    layer = KroneckerMap("w", None, shape, groups, root(ROWS, 0), root(COLUMNS, 3))
    return LayerwiseWhitener([layer], ["w"])


def noise_after(back_map):
    """Standard deviations ``[rows, columns]`` from the map written down."""
    matrix = small_map(1).materialize({"w": torch.zeros(ROWS, COLUMNS)}).double()
    back = {"none": torch.eye(ROWS * COLUMNS), "natural": matrix.T}
    back["inverse"] = torch.linalg.inv(matrix)
    variances = reference.mapped_variances(back[back_map], VARIANCE)
    return torch.tensor(variances).sqrt().reshape(ROWS, COLUMNS)


def ratios(chain, back_map, *, factor=1.0, plain=False, steps=150):
    """``[rows, columns]``: the corrected second moment over that of the signal.

    The signal is a constant; after the back-map it is as large as the noise in every
    coordinate.

    Args:
        chain: ends with AdamBC.
        back_map: how the release leaves the frame of its whitener.
        factor: on the variance that AdamBC is told.
        plain: tell it the variance before the back-map.
        steps: of the run.
    """
    whitening, rule = small_map(GROUPS), FlatClipping(1.0)
    signal = noise_after(back_map).float()
    wanted = {"w": signal.repeat(GROUPS, 1)}
    before = {"none": dict, "natural": whitening.inverse, "inverse": whitening.apply}
    released = before[back_map](wanted)["w"]  # the map is symmetric
    generator = torch.Generator().manual_seed(5)
    state = chain.init(wanted)
    for step in range(steps):
        noise = STD * torch.randn(released.shape, generator=generator)
        values = {"w": BATCH * released + noise}
        release = restore_release(values, whitening.frame, step, noise_std=STD)
        white = noise_variance(release, rule, BATCH)
        mean = {"w": values["w"] / BATCH}
        seen = read_out(Gradient(mean, white), whitening, back_map)
        told = white if plain else seen.noise_variance
        told = {n: factor * v for n, v in told.items()}
        _, state = chain.update(Gradient(seen.values, told), state)
    found = chain.transforms[-1].second_moment(state[-1])["w"]
    average = found.reshape(GROUPS, ROWS, COLUMNS).double().mean(0)
    return average / signal.double().square()


def is_unbiased(found, expected=1.0):
    """The check: within 2 % of the signal's second moment, in every coordinate."""
    return bool(((found / expected - 1).abs() <= 0.02).all())


CORRECTION = Chain((AdamBC(beta2=0.99),))


@pytest.mark.parametrize("back_map", ["none", "natural", "inverse"])
def test_the_corrected_second_moment_is_the_signals(back_map):
    assert is_unbiased(ratios(CORRECTION, back_map))


@pytest.mark.parametrize("back_map", ["none", "natural", "inverse"])
def test_a_wrong_phi_is_caught(back_map):
    for factor in (0.0, 0.8, 1.2):
        assert not is_unbiased(ratios(CORRECTION, back_map, factor=factor))
    if back_map != "none":  # what a plain release would have
        assert not is_unbiased(ratios(CORRECTION, back_map, plain=True))


@pytest.mark.parametrize(
    ("filtering", "gain"),
    [
        (Momentum(0.5), 2.0),
        (Momentum(0.5, nesterov=True), 2.0),
        (KalmanFilter(0.7), 1.0),
    ],
    ids=repr,
)
def test_the_noise_that_a_filter_leaves_is_taken_away_too(filtering, gain):
    """A filter lets a constant through ``gain`` times, and another share of noise."""

    class Settled(Chain):
        def init(self, parameters):
            return super().init(parameters, look_ahead=True)

    chain = Settled((filtering, AdamBC(beta2=0.98)))
    assert is_unbiased(ratios(chain, "natural", steps=300), gain**2)


def test_a_transform_that_hides_the_noise_cannot_stand_before_adambc():
    with pytest.raises(ConfigurationError, match="AdamBC corrects"):
        Chain((AdamBC(), AdamBC()))
    with pytest.raises(ConfigurationError, match="not told"):
        AdamBC().update(
            Gradient({"w": torch.zeros(2)}), AdamBC().init({"w": torch.zeros(2)})
        )


def test_applying_a_release_tells_adambc_what_the_back_map_did():
    """The whole way: release, mean, back-map, AdamBC, plain SGD, by the formula."""
    map_, parameters = whitener()
    matrix = map_.materialize(parameters).double()
    own = {n: torch.nn.Parameter(p.clone()) for n, p in parameters.items()}
    chain = Chain((AdamBC(0.8, 0.9, 1e-4),))
    optimizer = torch.optim.SGD(own.values(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    state, releases = chain.init(own), []
    for step in range(12):
        values = {
            n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for n, p in own.items()
        }
        releases.append(torch.cat([v.flatten() for v in values.values()]))
        state, _ = apply_release(
            restore_release(values, map_.frame, step, noise_std=STD),
            own,
            optimizer,
            expected_batch_size=BATCH,
            rule=FlatClipping(1.0),
            chain=chain,
            state=state,
            back=partial(read_out, whitener=map_, back_map="natural"),
        )
    seen = torch.stack(releases) @ matrix / BATCH
    noise = reference.mapped_variances(matrix.T, VARIANCE)
    moved = torch.cat([p.detach().flatten() for p in own.values()])
    for j in range(len(matrix)):
        updates = reference.adambc(seen[:, j].tolist(), [noise[j]] * 12, 0.8, 0.9, 1e-4)
        assert float(moved[j]) == pytest.approx(-0.1 * sum(updates), rel=1e-6)
