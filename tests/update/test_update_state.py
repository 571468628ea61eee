"""States of transforms in checkpoints, torch optimisers beside them, averages."""

import json

import pytest
import torch

from curvedp.barrier import IDENTITY_FRAME
from curvedp.clipping import FlatClipping
from curvedp.noise import restore_release
from curvedp.train.encoding import decode_state, encode_state
from curvedp.update import (
    AdamBC,
    Chain,
    ExponentialAverage,
    Gradient,
    KalmanFilter,
    Momentum,
    TailAverage,
    Transform,
    apply_release,
)

CHAINS = {
    "none": Chain(),
    "momentum": Chain((Momentum(0.9), ExponentialAverage(0.9))),
    "adambc": Chain((AdamBC(), TailAverage(3))),
    "filtered": Chain((Momentum(0.5, nesterov=True), AdamBC(), ExponentialAverage())),
    "kalman": Chain((KalmanFilter(0.6), TailAverage(2))),
    "kalman, adambc": Chain((KalmanFilter(0.6), AdamBC())),
    "nested": Chain((Chain((Momentum(),)), AdamBC())),
}
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


def releases(steps, dtype):
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        values = {
            "w": torch.randn(4, 3, generator=generator).to(dtype),
            "b": torch.randn(5, generator=generator).to(dtype),
        }
        yield restore_release(values, IDENTITY_FRAME, step, noise_std=1.5)


class Run:
    def __init__(self, chain, optimiser, dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        self.own = {
            "w": torch.nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype)),
            "b": torch.nn.Parameter(torch.randn(5, generator=generator).to(dtype)),
        }
        self.chain = chain
        self.optimizer = OPTIMISERS[optimiser](self.own.values())
        self.state = chain.init(self.own, look_ahead=True)

    def apply(self, release):
        self.state, _ = apply_release(
            release, self.own, self.optimizer, expected_batch_size=8.0,
            rule=FlatClipping(1.0), chain=self.chain, state=self.state,
        )  # fmt: skip

    def stored(self):
        """Through JSON and named tensors, as a checkpoint does it."""
        whole = {
            "own": {n: p.detach().clone() for n, p in self.own.items()},
            "optimizer": self.optimizer.state_dict(),
            "chain": self.state,
        }
        tensors = {}
        text = json.dumps(encode_state(whole, tensors))
        return text, {n: t.detach().clone() for n, t in tensors.items()}

    def load(self, stored):
        state = decode_state(json.loads(stored[0]), stored[1])
        for name, p in self.own.items():
            p.data.copy_(state["own"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.state = state["chain"]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_resumed_run_ends_with_the_same_bits(chain, optimiser, dtype, stop):
    released = list(releases(10, torch.float32))
    whole = Run(CHAINS[chain], optimiser, dtype)
    for release in released:
        whole.apply(release)
    first = Run(CHAINS[chain], optimiser, dtype)
    for release in released[:stop]:
        first.apply(release)
    second = Run(CHAINS[chain], optimiser, dtype)
    second.load(first.stored())
    for release in released[stop:]:
        second.apply(release)
    for name in whole.own:
        assert torch.equal(whole.own[name], second.own[name])
    assert json.dumps(encode_state(whole.state, {})) == json.dumps(
        encode_state(second.state, {})
    )
    ahead = [run.chain.look_ahead(run.state) for run in (whole, second)]
    averages = [run.chain.averaged(run.state) for run in (whole, second)]
    for name in whole.own:
        if ahead[0] is not None:
            assert torch.equal(*(a.offsets[name] for a in ahead))
        if averages[0] is not None:
            assert torch.equal(*(a[name] for a in averages))


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_optimiser_cannot_write_into_a_transforms_state(optimiser):
    """Torch's Nesterov adds its momentum into ``.grad`` itself."""
    with_optimiser, without = Run(CHAINS["momentum"], optimiser), None
    state = CHAINS["momentum"].init(with_optimiser.own)
    for release in releases(4, torch.float32):
        with_optimiser.apply(release)
        mean = {n: v / 8.0 for n, v in release.values.items()}
        without, state = CHAINS["momentum"].update(Gradient(mean), state)
    velocity = with_optimiser.state[0]["velocity"]
    for name, value in without.values.items():
        assert torch.equal(velocity[name], value)


def test_heavy_ball_is_torchs():
    for nesterov in (False, True):
        mine = Run(Chain((Momentum(0.9, nesterov),)), "sgd")
        theirs = Run(Chain(), "sgd")
        theirs.optimizer = torch.optim.SGD(
            theirs.own.values(), lr=0.1, momentum=0.9, nesterov=nesterov
        )
        for release in releases(8, torch.float32):
            mine.apply(release)
            theirs.apply(release)
        for name in mine.own:
            assert torch.allclose(mine.own[name], theirs.own[name], atol=1e-6)


def test_averages_are_of_the_released_parameters():
    run = Run(Chain((TailAverage(2),)), "sgd")
    start = run.chain.averaged(run.state)
    assert torch.equal(start["w"], run.own["w"].detach())
    seen = []
    for release in releases(6, torch.float32):
        run.apply(release)
        seen.append({n: p.detach().clone() for n, p in run.own.items()})
        average = run.chain.averaged(run.state)
        tail = seen[2:] or seen[-1:]
        for name in run.own:
            mean = torch.stack([s[name] for s in tail]).mean(0)
            assert torch.allclose(average[name], mean, atol=1e-6)
    # training goes on from the last ones
    assert not torch.allclose(run.own["w"], average["w"])
    assert Run(Chain((Momentum(),)), "sgd").chain.averaged([{}]) is None


def test_only_chains_that_ask_pay_for_the_noise_or_the_steps():
    class Curious(Transform):
        def init(self, parameters):
            return []

        def update(self, gradient, state):
            return gradient, [gradient.noise_variance]

    run = Run(Chain((Curious(),)), "sgd")
    assert not run.chain.reads_noise and not run.chain.follows_steps
    run.apply(next(releases(1, torch.float32)))
    assert run.state == [[None]]
    assert Chain((Momentum(), AdamBC())).reads_noise
    assert Chain((Chain((TailAverage(),)),)).follows_steps
