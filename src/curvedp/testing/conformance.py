"""Suites for extension authors: does it keep the promises of its protocol?

Each function raises ``AssertionError`` with what is broken, or returns. Call them from
a test of your own::

    def test_my_rule_conforms():
        check_clipping_rule(MyRule(1.5))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import IDENTITY_FRAME, ClippedSum
from curvedp.clipping import ClippingRule, clipped_sum
from curvedp.clipping.bounded import kept_of_bound
from curvedp.errors import CurvedpError
from curvedp.layers.io import DirectIO, LayerIO
from curvedp.noise import Mechanism, NoiseState, RandomStreams
from curvedp.update import Gradient, Transform
from curvedp.whitening import IdentityWhitener, Whitener

__all__ = [
    "check_clipping_rule",
    "check_mechanism",
    "check_transform",
    "check_whitener",
]

Values = Mapping[str, Tensor]

#: Agreement of two float32 computations of the same quantity, relative.
FLOAT32_AGREEMENT = 1e-4

#: A contribution may exceed its bound by this much, relative: float32 round-off of the
#: measurement itself.
BOUND_SLACK = 1e-6

#: Draws of a mechanism's noise, and how many standard errors its moments may be off.
#: The noise is seeded, so a mechanism that passes once passes always.
NOISE_DRAWS = 200_000
STANDARD_ERRORS = 5.0


def check_whitener(
    whitener: Whitener, parameters: Values, ios: Sequence[LayerIO], *, seed: int = 0
) -> None:
    """The identities of :class:`curvedp.whitening.Whitener`.

    Args:
        whitener: the map P.
        parameters: tensors with the names and shapes that P acts on; keep them small,
            the map is materialised.
        ios: layers' captured values, to compare ``sq_norms`` with the map itself.
        seed: of the random test vectors.
    """
    u, v = _random(parameters, seed), _random(parameters, seed + 1)
    image = whitener.apply(u)
    assert image.keys() == parameters.keys(), "apply must keep the parameter names"
    matrix = whitener.materialize(parameters).double()
    _agree(matrix @ _flat(u), _flat(image), "materialize() @ u is not apply(u)")
    combined = {name: u[name] + 2 * v[name] for name in u}
    expected = _flat(image) + 2 * _flat(whitener.apply(v))
    _agree(_flat(whitener.apply(combined)), expected, "apply is not linear")
    left = _flat(image) @ _flat(v)
    right = _flat(u) @ _flat(whitener.adjoint(v))
    scale = _flat(image).norm() * _flat(v).norm()
    assert abs(left - right) <= FLOAT32_AGREEMENT * scale, "<Pu, v> is not <u, P^T v>"
    _agree(_flat(whitener.inverse(image)), _flat(u), "inverse(apply(u)) is not u")
    _agree(_flat(whitener.apply(whitener.inverse(v))), _flat(v), "P P^-1 v is not v")
    back = torch.linalg.inv(matrix)
    for inverse, rows in ((False, matrix.T), (True, back)):
        found = whitener.row_sq_norms(u, inverse=inverse)
        wanted = rows.square().sum(1)
        _agree(_flat(found), wanted, f"row_sq_norms(inverse={inverse}) is not so")
    for io in ios:
        grads = io.per_example()
        norms = whitener.sq_norms(io)
        for i in range(io.batch_size):
            one = {n: torch.zeros_like(p) for n, p in parameters.items()}
            one |= {n: g[i] for n, g in grads.items()}
            true = float((matrix @ _flat(one)).square().sum())
            given = float(norms[i])
            assert given >= true * (1 - BOUND_SLACK), (
                f"sq_norms of {io!r} is below ||P g||^2"
            )
            # equal up to an allowance for rounding, which may be of the fourth digit
            assert given <= true * (1 + 10 * FLOAT32_AGREEMENT) + 1e-30, (
                f"sq_norms of {io!r} is far above ||P g||^2"
            )


def check_clipping_rule(rule: ClippingRule, *, seed: int = 0) -> None:
    """No example contributes more than ``rule.bound``, from tiny to enormous ones.

    Also: a non-finite example and padding contribute nothing, and the rule has no
    memory (the same norms give the same weights).
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([0.0, 1e-30, 1e-6, 0.1, 1.0, 3.0, 1e3, 1e9, 1e15])
    shapes = {"a.w": (4, 3), "b.w": (5,), "c.w": (1,)}
    grads = {
        name: torch.randn(len(scales), *shape, generator=generator)
        * scales.reshape(-1, *([1] * len(shape)))
        for name, shape in shapes.items()
    }
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    ios = [DirectIO(name[0], {name: g}) for name, g in grads.items()]
    sq_norms = torch.stack([io.sq_norms() for io in ios])
    first, second = rule.weights(sq_norms), rule.weights(sq_norms.clone())
    assert first.shape == sq_norms.shape, "weights must have the shape of the norms"
    assert torch.equal(first, second), "the rule must not depend on earlier batches"

    def contribution(layers: Sequence[LayerIO], i: int) -> float:
        present = torch.arange(len(scales)) == i
        total = clipped_sum(
            layers,
            rule,
            IdentityWhitener(),
            parameters=parameters,
            present=present,
            step=0,
        )
        assert total.bound == rule.bound, "the sum must carry the rule's bound"
        # what is kept for the rounding of a batch would hide a rule that gives too much
        kept = kept_of_bound(len(scales), parameters["a.w"])
        return float(_flat(total.values).norm()) / kept

    for i, scale in enumerate(scales):
        length = contribution(ios, i)
        assert length <= rule.bound * (1 + BOUND_SLACK), (
            f"an example of scale {float(scale):g} contributes {length}, and the "
            f"bound is {rule.bound}"
        )
    for bad in (math.nan, math.inf):
        broken = grads["b.w"].clone()
        broken[2, 0] = bad
        ios_broken = [ios[0], DirectIO("b", {"b.w": broken}), ios[2]]
        assert contribution(ios_broken, 2) == 0, f"an example with {bad} contributes"


def check_mechanism(mechanism: Mechanism, bound: float, noise_std: float) -> None:
    """Noise on every coordinate, of the law it claims, also for an empty batch.

    Args:
        mechanism: makes releases.
        bound: the largest bound of the sums it accepts.
        noise_std: standard deviation that it claims for one coordinate of one step.
    """
    streams = RandomStreams(0, unsafe_reproducible_noise=0)
    state = mechanism.init(streams)
    shapes = {"w": (NOISE_DRAWS,), "b": (3,), "scalar": ()}
    empty = {name: torch.zeros(shape) for name, shape in shapes.items()}
    releases = []
    for step in range(2):
        clipped = ClippedSum(empty, bound, IDENTITY_FRAME, step)
        release, state = mechanism.update(clipped, state)
        assert release.values.keys() == empty.keys(), "a parameter got lost"
        assert (release.step, release.frame) == (step, IDENTITY_FRAME)
        releases.append(release)
    noise = releases[0].values["w"].double()
    for name, value in releases[0].values.items():
        assert bool((value != 0).all()), f"a coordinate of {name!r} got no noise"
    assert all(bool((v == 0).all()) for v in empty.values()), "the sum was changed"
    error = STANDARD_ERRORS / math.sqrt(NOISE_DRAWS)
    std = float(noise.std())
    assert abs(float(noise.mean())) <= error * noise_std, "the noise has a mean"
    assert abs(std / noise_std - 1) <= error, f"std {std} instead of {noise_std}"
    again = releases[1].values["w"].double()
    correlation = float((noise * again).mean()) / (std * float(again.std()))
    if _independent(mechanism):
        assert abs(correlation) <= error, "the noise of two steps is correlated"
    assert not torch.equal(noise, again), "two steps have the same noise"
    ones = {name: torch.ones(shape) for name, shape in shapes.items()}
    shifted, _ = mechanism.update(
        ClippedSum(ones, bound, IDENTITY_FRAME, 0),
        mechanism.init(RandomStreams(0, unsafe_reproducible_noise=0)),
    )
    for name, v in shifted.values.items():
        moved = v - releases[0].values[name]
        _agree(moved.double(), ones[name].double(), "the noise depends on the data")
    try:
        mechanism.update(
            ClippedSum(empty, 2 * bound, IDENTITY_FRAME, 2), NoiseState(streams)
        )
    except CurvedpError:
        return
    raise AssertionError("a sum with a larger bound than the noise is made for passes")


def check_transform(transform: Transform, parameters: Values, *, seed: int = 0) -> None:
    """A pure function: same arguments, same result, and the arguments are left alone.

    Replaying a stored release after a crash relies on it. Three steps are made; the
    state must be made of what a checkpoint can hold, and the noise of the output, where
    the transform tracks it, has a variance that is not negative.
    """
    state = transform.init(parameters)
    for step in range(3):
        values = _random(parameters, seed + step)
        noise = {n: torch.tensor(0.25, dtype=torch.float64) for n in values}
        given = copy.deepcopy((values, noise, state))
        with torch.random.fork_rng(devices=[]):  # the global random state
            torch.manual_seed(seed)  # must not matter
            once, then = transform.update(Gradient(values, noise), state)
            first = copy.deepcopy((once.values, once.noise_variance, then))
            same = _equal((values, noise, state), given)
            assert same, "update changed its arguments"
            torch.manual_seed(seed + 1)
            again, following = transform.update(Gradient(*given[:2]), given[2])
        second = (again.values, again.noise_variance, following)
        assert _equal(first, second), "update is not a function of its arguments"
        assert again.values.keys() == values.keys(), "update must keep the names"
        for name, value in again.values.items():
            assert value.shape == values[name].shape, f"{name!r} changed its shape"
        _check_noise(transform, again, parameters)
        state = _check_step(transform, parameters, following, seed + step)
        _check_storable(state)


def _check_noise(transform: Transform, gradient: Gradient, parameters: Values) -> None:
    variances = gradient.noise_variance
    if variances is None:
        assert not transform.tracks_noise, "tracks_noise, and gives no noise_variance"
        return
    for name, p in parameters.items():
        variance = variances[name]
        assert variance.dim() == 0 or variance.shape == p.shape, f"{name!r}: its shape"
        assert bool((variance >= 0).all()), f"{name!r}: a negative variance"


def _check_step(transform: Transform, parameters: Values, state: Any, seed: int) -> Any:
    before, after = dict(parameters), _random(parameters, seed)
    given = copy.deepcopy((before, after, state))
    following = transform.stepped(before, after, state)
    assert _equal((before, after, state), given), "stepped changed its arguments"
    kept = copy.deepcopy(following)
    for value in after.values():
        value += 1
    assert _equal(following, kept), "stepped keeps a reference to the parameters"
    return following


def _check_storable(state: Any) -> None:
    if isinstance(state, dict):
        for value in state.values():
            _check_storable(value)
    elif isinstance(state, list | tuple):
        for value in state:
            _check_storable(value)
    else:
        plain = state is None or isinstance(state, Tensor | bool | int | float | str)
        assert plain, f"a {type(state).__name__} in the state cannot be stored"


def _independent(mechanism: Mechanism) -> bool:
    """Correlated mechanisms say so by an attribute; all others are independent."""
    return not getattr(mechanism, "correlated", False)


def _random(like: Values, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in like.items()}


def _flat(values: Values) -> Tensor:
    return torch.cat([v.double().flatten() for v in values.values()])


def _agree(x: Tensor, y: Tensor, message: str) -> None:
    assert x.shape == y.shape, message
    error = float((x - y).norm())
    assert error <= FLOAT32_AGREEMENT * float(y.norm()), f"{message} (off by {error})"


def _equal(x: Any, y: Any) -> bool:
    leaves, spec = torch.utils._pytree.tree_flatten(x)
    others, other_spec = torch.utils._pytree.tree_flatten(y)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )
