"""Random layers, nets, settings and hostile values: how far does one example reach?

Two levels. *Sums*: captured values are made up directly, so that every float can be
reached, and one example after the other is taken out of a clipped sum. *Runs*: a random
net is attached with random settings, and its next step is replayed on neighbours.
hypothesis looks for the largest ratio of measured to declared sensitivity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, seed, settings, target
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.clipping import (
    AdaptiveClipping,
    FlatClipping,
    NormalisedClipping,
    PerLayerClipping,
)
from curvedp.clipping.bounded import clipped_sum, where_needed
from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.lookup import LookupIO
from curvedp.layers.precision import NormPrecision
from curvedp.testing.neighbours import Figures, Replay, distance, try_neighbours
from curvedp.whitening import IdentityWhitener, KroneckerMap, LayerwiseWhitener
from curvedp.whitening.roots import FullRoot, IdentityRoot

#: What an example may be made of.
KINDS = ["plain", "nan", "inf", "huge", "tiny", "zero", "same", "cancels", "almost"]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16]


@dataclass(frozen=True)
class Drawn:
    """Captured values of a layer, made up."""

    form: str
    kinds: tuple[str, ...]
    t: int
    p: int
    r: int
    bias: bool
    exponent: float
    dtype: torch.dtype
    method: NormMethod | None
    seed: int

    def layer(self):
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b = len(self.kinds)
        a, d = normal(b, self.t, self.p), normal(b, self.t, self.r)
        for k, kind in enumerate(self.kinds):
            self._spoil(kind, a[k], d[k], a[0], d[0], generator)
        a, d = a.to(self.dtype), d.to(self.dtype)
        if self.form == "dense":
            shape = torch.Size((self.r, self.p))
            bias = "l.bias" if self.bias else None
            return DenseIO(
                "l", "l.weight", bias, [(a, d)], LinearGeometry(shape), self.method
            )
        if self.form == "lookup":
            ids = torch.randint(0, 4, (b, self.t), generator=generator)
            return LookupIO("l", "l.weight", 4, None, [(ids, d)])
        return DirectIO("l", {"l.weight": d[:, 0]})

    def _spoil(self, kind, a, d, first_a, first_d, generator):
        """Make an example what its kind says; ``a [T, p]`` and ``d [T, r]``."""
        size = 10.0**self.exponent
        if kind in ("nan", "inf"):
            d[0, 0] = float(kind)
        elif kind == "huge":
            d *= 1e30
        elif kind == "tiny":
            d *= 1e-42
            a *= 1e-3
        elif kind == "zero":
            d.zero_()
        elif kind == "same":
            a.copy_(first_a), d.copy_(first_d)
        elif kind in ("cancels", "almost") and len(a) > 1:
            half = len(a) // 2
            noise = torch.randn(a[:half].shape, generator=generator, dtype=a.dtype)
            a[half : 2 * half] = a[:half] * (1 + noise / size * (kind == "almost"))
            d[half : 2 * half] = -d[:half]
            d[2 * half :] = 0
            d *= size

    def shapes(self, io):
        return {
            n: torch.zeros(g.shape[1:], dtype=self._kept())
            for n, g in io.take(slice(0, 1)).per_example().items()
        }

    def _kept(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def drawn_layers():
    return st.builds(
        Drawn,
        form=st.sampled_from(["dense", "dense", "dense", "lookup", "direct"]),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8).map(tuple),
        t=st.sampled_from([1, 2, 3, 4, 8, 33]),
        p=st.sampled_from([1, 2, 7, 40]),
        r=st.sampled_from([1, 3, 10]),
        bias=st.booleans(),
        exponent=st.floats(0, 12),
        dtype=st.sampled_from(DTYPES),
        method=st.sampled_from([None, *NormMethod]),
        seed=st.integers(0, 2**16),
    )


def rules():
    bounds = st.sampled_from([1e-6, 0.01, 1.0, 37.0])
    plain = [FlatClipping, NormalisedClipping, PerLayerClipping]
    return st.one_of(
        st.builds(lambda kind, c: kind(c), st.sampled_from(plain), bounds),
        bounds.map(AdaptiveClipping.start),
    )


def whitener(drawn, io, steep):
    """The identity, or a Kronecker map with a spectrum from 1 to ``steep``."""
    if steep == 1 or drawn.form != "dense":
        return IdentityWhitener()
    size = drawn.p + drawn.bias
    generator = torch.Generator().manual_seed(drawn.seed)
    basis = torch.linalg.qr(
        torch.randn(size, size, generator=generator, dtype=torch.float64)
    )[0]
    values = torch.logspace(0, math.log10(steep), size, dtype=torch.float64)
    shape = torch.Size((drawn.r, drawn.p))
    root = FullRoot(basis.unsqueeze(0), values.unsqueeze(0))
    layer = KroneckerMap(
        "l.weight", "l.bias" if drawn.bias else None, shape, 1, IdentityRoot(), root
    )
    return LayerwiseWhitener([layer], list(drawn.shapes(io)))


def always(finite):
    """Replaces whatever the values are, as a graph does, which cannot look."""
    return True


def worst_of_sum(drawn, rule, norms, steep, replacing):
    """Largest move of the sum when one example is taken out, over the bound."""
    io = drawn.layer()
    parameters, rows = drawn.shapes(io), torch.arange(len(drawn.kinds))
    own = whitener(drawn, io, steep)

    def total(present):
        return clipped_sum(
            [io], rule, own, parameters=parameters, present=present, step=0,
            norms=norms, replacing=replacing,
        )  # fmt: skip

    everybody = total(rows >= 0)
    moves = [distance(everybody, total(rows != i)) / rule.bound for i in rows.tolist()]
    assert all(map(math.isfinite, moves)), "a sum is not finite"
    return max(moves), len(moves)


def _settings(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def fuzz_sums(examples, number=0):
    """The worst of a search over sums; another ``number`` is another search."""
    found = []

    @seed(number)
    @_settings(examples)
    @given(
        drawn=drawn_layers(),
        rule=rules(),
        norms=st.sampled_from(list(NormPrecision)),
        steep=st.sampled_from([1, 1, 1, 30.0, 1e4]),
        replacing=st.sampled_from([always, where_needed]),
    )
    def search(drawn, rule, norms, steep, replacing):
        worst, tried = worst_of_sum(drawn, rule, norms, steep, replacing)
        found.append((worst, tried, (drawn, rule, norms, steep, replacing)))
        target(worst)

    search()
    worst = max(found, key=lambda item: item[0])
    figures = Figures(sum(n for _, n, _ in found), worst[0], {"sums": worst[0]})
    return figures, worst[2]


# -- whole runs ------------------------------------------------------------------------

FLOATS = [0.0, 1.0, -3.0, 1e-42, 1e-20, 1e4, 1e19, 1e30, 3e38,
          float("nan"), float("inf"), float("-inf")]  # fmt: skip


def layers(draw):
    """A random stack for inputs [T, 4], and what it gives."""
    parts, width = [], 4
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(["linear", "norm", "conv", "unbiased", "tanh"]))
        if kind in ("linear", "unbiased"):
            new = draw(st.sampled_from([1, 5, 20]))
            parts.append(nn.Linear(width, new, bias=kind == "linear"))
            width = new
        elif kind == "norm":
            parts.append(nn.LayerNorm(width))
        elif kind == "conv":
            parts += [Across(width)]
        else:
            parts.append(nn.Tanh())
    return nn.Sequential(*parts, Mean(), nn.Linear(width, 3))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Across(nn.Module):
    """A convolution along the positions."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 2, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x.mT).mT)


RUNS = ["dp-sgd", "dp-adambc", "dp-kfc", "dp-ngd", "gep", "adadps"]


@st.composite
def runs(draw):
    torch.manual_seed(draw(st.integers(0, 99)))
    model = layers(draw)
    n, t = draw(st.integers(2, 9)), draw(st.sampled_from([1, 2, 5]))
    x, y = torch.randn(n + 4, t, 4), torch.randint(0, 3, (n + 4,))
    for k in range(n + 4):
        how = draw(st.sampled_from(["plain", "plain", "all", "one", "copy", "scaled"]))
        value = draw(st.sampled_from(FLOATS))
        if how == "all":
            x[k] = value
        elif how == "one":
            x[k, -1, 0] = value
        elif how == "copy":
            x[k], y[k] = x[0], y[0]
        elif how == "scaled":
            x[k] *= value
    recipe = draw(st.sampled_from(RUNS))
    clippings = ["flat", "normalised", "per-layer"]
    options = {
        "recipe": recipe,
        "clip_norm": draw(st.sampled_from([1e-3, 1.0, 50.0])),
        "clipping": draw(st.sampled_from(clippings)),
        "physical_batch_size": draw(st.sampled_from([1, 2, 16])),
        "norm_precision": draw(st.sampled_from([None, "float32", "bf16"])),
        "precision": draw(st.sampled_from([None, "bf16", "bf16-kept"])),
    }
    if recipe in ("dp-kfc", "dp-ngd", "gep", "adadps"):
        options |= {"probe_size": 8, "probe_batches": 2}
    return model, x, y, n, options


def worst_of_run(model, x, y, n, options):
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x, y),
        loss="cross-entropy", noise_multiplier=1.0, sample_rate=0.5, steps=2,
        expected_batch_size=4, delta=1e-5, unsafe_reproducible_noise=1, **options,
    )  # fmt: skip
    return try_neighbours(Replay(private), range(n), range(n, n + 4))


def fuzz_runs(examples, number=0):
    found = []

    @seed(number)
    @_settings(examples)
    @given(run=runs())
    def search(run):
        figures = worst_of_run(*run)
        found.append((figures, run[-1]))
        target(figures.worst)

    search()
    worst = max(found, key=lambda item: item[0].worst)
    return sum((f for f, _ in found), Figures()), worst[1]
