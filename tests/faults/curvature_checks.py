"""Checks of the rules about curvature: no hidden oracle, no whitener from the batch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from curvedp.barrier import Provenance
from curvedp.clipping import CurvatureClipping, FlatClipping, MeasuredLayer
from curvedp.clipping import clipped_sum as bounded_sum
from curvedp.errors import ConfigurationError, NotPrivateError
from curvedp.experiments import RunConfig
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO
from curvedp.layers.linear import LinearGeometry
from curvedp.probes import OracleProbe
from curvedp.whitening import (
    DiagonalMap,
    IdentityWhitener,
    LayerwiseWhitener,
    SubspaceMap,
    SubspaceWhitener,
)

from .cases import attach, examples, train
from .checking import clipped_sum, refused

WHITENED = {"recipe": "dp-kfc", "seed": 3, "probe_size": 8, "probe_batches": 1}


def frame(dataset, **options):
    """The coordinates in which the first step of a whitened run clips."""
    return clipped_sum(dataset, **{**WHITENED, **options}).frame


# -- rule 9: curvature from private data is labelled, and has no epsilon --


def oracle_has_no_guarantee():
    private = attach(
        examples(), **WHITENED, probe="oracle", unsafe_reproducible_noise=None
    )
    train(private)
    facts = private.statement().facts
    assert not facts["private"], "an oracle's statement claims a guarantee"
    assert facts["epsilon"] is facts["epsilon_spent"] is None
    refused(NotPrivateError, "private data", private.epsilon)


def unsaid_oracle_is_refused():
    refused(
        ConfigurationError,
        "oracle",
        lambda: attach(examples(), **WHITENED, probes=OracleProbe(examples())),
    )


def oracle_is_not_forgotten():
    options = {**WHITENED, "unsafe_reproducible_noise": None}
    with tempfile.TemporaryDirectory() as folder:
        options["run_dir"] = Path(folder) / "run"
        with attach(examples(), probe="oracle", **options) as first:
            first.save()
            train(first)
        with attach(examples(), **options) as second:
            facts = second.statement().facts
    assert not facts["private"], "the run's first steps looked at private data"
    assert facts["epsilon"] is facts["epsilon_spent"] is None


def oracle_run_is_labelled():
    oracle = RunConfig("digits", recipe="dp-kfc", recipe_settings={"probe": "oracle"})
    assert not oracle.private, "run.json, metrics and predictions have no label"
    assert RunConfig("digits", recipe="dp-kfc").private


# -- rule 11: the whitener is a function of public seeds and released parameters --


def whitener_ignores_what_is_in_the_batch():
    own = examples()
    other = TensorDataset(5 * own.tensors[0] + 1, own.tensors[1])
    assert frame(own) == frame(other), "the whitener looked at the batch"


def whitener_ignores_the_size_of_the_batch():
    x, y = examples().tensors
    frames = {frame(TensorDataset(x[:n], y[:n])) for n in (24, 23)}
    assert len(frames) == 1, "the whitener tells 24 examples from 23"


def whitener_follows_the_public_seed_alone():
    frames = {frame(examples(), unsafe_reproducible_noise=n) for n in (7, 8)}
    assert len(frames) == 1, "probes are drawn from the secret stream of the noise"
    assert frame(examples(), seed=4) not in frames


def whitener_changes_at_declared_steps_only():
    private = attach(examples(), **WHITENED, steps=8, refresh=3)
    frames = []
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        if private._engine.accumulate():
            frames.append(private._engine._open.pending.frame)
            private._engine.release()
    changes = [i for i in range(1, 8) if frames[i] != frames[i - 1]]
    assert changes == [3, 6], f"declared were steps 3 and 6, changed {changes}"


def whitener_is_made_of_released_parameters():
    """A map that is made again on resuming is the one that was used before."""
    options = {**WHITENED, "side": "both", "steps": 4, "refresh": 3}
    whole = train(attach(examples(), **options))
    private = attach(examples(), **options)
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if private.step == 2:
            break
    state = private.state_dict()
    again = attach(examples(), **options)
    again.load_state_dict(state)
    assert torch.equal(train(again), whole), "another whitener after resuming"


# -- rule 12: the bound holds for maps of several parts, and after rounding --


def contribution(whitener, io, bound):
    total = bounded_sum(
        [io], FlatClipping(bound), whitener, parameters={"w": torch.zeros(6)},
        present=torch.ones(1, dtype=torch.bool), step=0,
    )  # fmt: skip
    return float(total.values["w"].double().norm())


def parts_share_one_bound():
    basis = torch.eye(6, 2, dtype=torch.float64)
    layer = SubspaceMap({"w": (6,)}, basis, 0.6**0.5, 0.4**0.5)
    shares = (0.6**0.5, 0.4**0.5)
    parameters = {"w": torch.zeros(6)}
    whitener = SubspaceWhitener([layer], shares, parameters, Provenance.PUBLIC)
    for inside, outside in ((1e3, 1e3), (1e3, 0.0), (1e-3, 1e3)):
        g = torch.tensor([[inside, inside, outside, outside, outside, outside]])
        length = contribution(whitener, DirectIO("l", {"w": g}), 1.0)
        assert length <= 1 + 1e-6, f"an example contributes {length}"


def what_cancels_in_float32_counts():
    x = torch.ones(1, 3, 40)
    d = torch.tensor([1e8, 1, -1e8]).reshape(1, 3, 1).expand(1, 3, 6).contiguous()
    shape = torch.Size((6, 40))
    io = DenseIO("l", "w", None, [(x, d)], LinearGeometry(shape))
    scales = {"w": torch.full(shape, 2.0, dtype=torch.float64)}
    whitener = LayerwiseWhitener([DiagonalMap(scales)], ["w"])
    total = bounded_sum(
        [io], FlatClipping(1.0), whitener, parameters={"w": torch.zeros(shape)},
        present=torch.ones(1, dtype=torch.bool), step=0,
    )  # fmt: skip
    length = float(total.values["w"].double().norm())
    assert length <= 1 + 1e-6, f"an example contributes {length}"


# -- rule 12: what is measured beside the gradient is in the same bound --


def measured(x, d, share=0.5):
    """The sum, gradient and factors, of one example of a linear layer."""
    shape = torch.Size((d.shape[-1], x.shape[-1]))
    io = DenseIO("l", "l.weight", None, [(x, d)], LinearGeometry(shape))
    layer = MeasuredLayer("l", "l.weight", None, 1, shape[1], shape[0], ("a", "g"))
    rule = CurvatureClipping(1.0, FlatClipping(1.0), share).measuring((layer,))
    total = bounded_sum(
        [io], rule, IdentityWhitener(),
        parameters={"l.weight": torch.zeros(shape)},
        present=torch.ones(1, dtype=torch.bool), step=0,
    )  # fmt: skip
    return torch.cat([v.double().flatten() for v in total.values.values()])


def gradient_and_factors_share_one_bound():
    generator = torch.Generator().manual_seed(0)
    for share in (0.1, 0.5, 0.9):
        for size in (1e-3, 1.0, 1e3, 1e15):
            x, d = (torch.randn(1, 1, n, generator=generator) for n in (40, 6))
            length = float(measured(size * x, size * d, share).norm())
            assert length <= 1 + 1e-6, f"an example contributes {length}"


def unseen_padding_is_in_no_factor():
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(1, 4, n, generator=generator) for n in (5, 3))
    d[:, 2:] = 0
    moved = (measured(x, d) - measured(x[:, :2], d[:, :2])).norm()
    assert moved <= 1e-6, "the length of the batch's sequences is in a factor"


def measured_curvature_is_declared():
    options = {"recipe": "dp-kfc", "probe": "private", "clip_norm": 2.0}
    private = attach(examples(), **options, unsafe_reproducible_noise=None)
    text, facts = str(private.statement()), private.statement().facts
    assert "measured on the private data" in text, "the statement does not say it"
    assert facts["clipping"]["curvature_share"] == 0.2, "nor does the ledger"
