"""Layers of several weights, and weights that modules share: one norm, cross terms."""

import pytest
import torch
from nets import ALL, TOKENS, loss
from passes import SEED, add_up, flat, in_float64, record

from curvedp.clipping import FlatClipping
from curvedp.layers import cover, joined
from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO
from curvedp.layers.grouping import grouped
from curvedp.layers.io import DirectIO, UnreachedIO
from curvedp.layers.joined import JoinedIO
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.lookup import LookupIO
from curvedp.layers.rounding import REACH

SIZE = 6

#: Agreement of two computations in float64 whose inputs are the same float32 values.
SAME = 1e-9

NAMES = [
    "language-model",
    "language-model-padding",
    "sequence-lstm-projected",
    "sequence-tied-linear",
    "sequence-tied-both",
    "sequence-tied-rnn",
    "sequence-tied-mixer",
    "image-conv-tied",
    "signal-signal-transposed-tied",
]


def joined_ios(name):
    net = next(net for net in ALL if str(net) == name)
    torch.manual_seed(SEED)
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(4))
    ios = record(model, coverage, batch, SIZE, loss, keep_inputs=True)
    found = [io for io in ios if isinstance(io, JoinedIO)]
    assert found, "the net has no joined layer"
    return found


def squares(gradients):
    return sum(g.flatten(1).square().sum(1) for g in gradients.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_norm_is_that_of_the_sum_in_chunks_too(name, monkeypatch):
    for io in joined_ios(name):
        true = squares(in_float64(io))
        norms = io.sq_norms()
        assert torch.all(norms >= true * (1 - SAME))
        # raised by what the float32 sum may round
        assert torch.allclose(norms, true, rtol=1e-4)
        monkeypatch.setattr(joined, "CHUNK_ELEMENTS", {"cpu": 1})
        assert torch.allclose(io.sq_norms(), norms, rtol=SAME)
        pieces = [io.take(slice(i, i + 2)).sq_norms() for i in range(0, SIZE, 2)]
        assert torch.allclose(torch.cat(pieces), norms, rtol=SAME)


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_a_person_are_one_gradient(name):
    for io in joined_ios(name):
        people = {n: g.unflatten(0, (-1, 2)).sum(1) for n, g in in_float64(io).items()}
        together = grouped(io, 2)
        assert together.batch_size == SIZE // 2
        assert torch.allclose(together.sq_norms(), squares(people), rtol=5e-4)
        weights = torch.tensor([0.5, 0.0, 2.0])
        for name_, total in together.weighted_sum(weights).items():
            expected = torch.einsum("i,i...->...", weights.double(), people[name_])
            assert torch.allclose(total.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_tied_table_is_never_written_down(name, monkeypatch):
    def refuse(self):
        raise AssertionError("wrote a gradient down")

    (io,) = joined_ios(name)
    monkeypatch.setattr(LookupIO, "per_example", refuse)
    monkeypatch.setattr(DenseIO, "per_example", refuse)
    io.sq_norms()


def test_the_short_ways_are_the_long_way(monkeypatch):
    """Each product of two parts against both gradients, written down."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def ids(t):
        return torch.randint(0, 30, (SIZE, t), generator=generator)

    geometry = LinearGeometry(torch.Size((30, 40)))
    linear = [
        DenseIO("l", "w", bias, [(normal(SIZE, t, 40), normal(SIZE, t, 30))], geometry)
        for t, bias in ((4, None), (3, "b"))
    ]
    table = [
        LookupIO("e", "w", 30, padding, [(ids(t), normal(SIZE, t, 40))])
        for t, padding in ((25, None), (35, 2))
    ]
    ways = set()
    for left in linear + table:
        for right in linear + table:
            way, _ = joined._way(left, right, "w")
            ways.add(way.__name__)
            product, _ = way(left, right)
            x, y = in_float64(left)["w"], in_float64(right)["w"]
            assert torch.allclose(product, (x * y).sum((1, 2)), rtol=SAME, atol=1e-7)
    assert ways >= {"_linear_linear", "_lookup_linear", "_lookup_lookup"}


@pytest.mark.parametrize("method", NormMethod)
def test_parts_that_cancel_contribute_no_more_than_the_bound(method):
    """The head's gradient is the table's with the sign turned, but for rounding."""
    t, p = 64, 8
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, TOKENS, (1, t), generator=generator)
    d = 1e3 * torch.randn(1, t, p, generator=generator)
    hot = torch.nn.functional.one_hot(ids, TOKENS).float()
    # sum_t hot_t (-d_t)^T, with the parts of each product rounded in another way
    head = DenseIO(
        "head",
        "w",
        None,
        [(-d / 3, 3 * hot)],
        LinearGeometry(torch.Size((TOKENS, p))),
        method,
    )
    io = JoinedIO("table", [LookupIO("table", "w", TOKENS, None, [(ids, d)]), head])
    left = flat(io.per_example()).norm()
    assert left**2 < 1e-6 * head.sq_norms(), "they do cancel"
    assert io.sq_norms() >= head.sq_norms() / REACH[torch.float32] ** 2
    rule = FlatClipping(1e-6)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(TOKENS, p))
    contribution = flat(add_up(model, [io], rule).values).norm()
    assert 0 < contribution <= rule.bound * (1 + 1e-6)


def test_a_part_that_the_batch_did_not_reach_adds_nothing():
    unreached = UnreachedIO("b", 2, torch.device("cpu"))
    direct = DirectIO("a", {"w": torch.ones(2, 3)})
    either = joined.joined("a", [unreached, direct])
    assert either.sq_norms().tolist() == pytest.approx([3.0, 3.0])
    both = joined.joined("a", [unreached, unreached])
    assert isinstance(both, UnreachedIO)
    assert both.name == "a"
