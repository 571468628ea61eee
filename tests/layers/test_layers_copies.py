"""Values that all examples share are followed to where they meet the batch."""

import pytest
import torch
from covering import Custom, covered, refused
from nets import loss
from nets_shared import shared
from passes import record
from torch import nn

from curvedp.errors import CouplingError, CoverageError
from curvedp.layers import Batch, Recording, cover, synthesiser_like
from curvedp.layers.copies import Copies, Meetings
from curvedp.layers.direct import RuleServer
from curvedp.testing import per_example_gradients

#: Those in which the batch cannot stand in front of what the layer returns.
FOLLOWED = {
    "relative-bias": {"bias"},
    "relative-bias-in-place": {"bias"},
    "relative-bias-fused": {"bias"},
    "relative-bias-padded": {"bias"},
    "computed-bias": {"inner.0", "inner.2"},
    "prefix": {"prefix", "norm", "inner"},
    "centre": {"table"},
}


@pytest.mark.parametrize("net", shared(), ids=str)
def test_copies_are_followed_where_it_takes_that(net):
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    found = {
        item.site.name
        for item in coverage.covered
        if isinstance(item.server, RuleServer) and item.server.meetings is not None
    }
    assert found == FOLLOWED.get(str(net), set())


@pytest.mark.parametrize("net", [n for n in shared() if not n.random], ids=str)
@pytest.mark.parametrize("size", [1, 2, 11])
def test_gradients_are_exact_at_any_size(net, size):
    model = net.make().double()
    coverage = cover(model, net.synthesiser(torch.float64), loss)
    batch = net.batch(size, torch.Generator().manual_seed(3), torch.float64)
    expected = per_example_gradients(model, loss, batch.inputs, batch.targets)
    for io in record(model, coverage, batch, size, loss):
        for name, g in io.per_example().items():
            torch.testing.assert_close(g, expected[name], rtol=1e-9, atol=1e-12)


def scaled_rows(m, x):
    """A shared scale meets a table of four rows, then the batch."""
    scale = m.table(torch.arange(3)).mean(0)  # [5]
    rows = m.rows * scale  # [4, 5]
    return m.head((x.unsqueeze(1) * rows).tanh().mean(1))


def scaled():
    model = Custom(scaled_rows, table=nn.Embedding(3, 5), head=nn.Linear(5, 3))
    model.register_buffer("rows", torch.randn(4, 5))
    return model


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_table_of_as_many_rows_as_examples_is_no_batch(size):
    model = scaled().double()
    x = torch.randn(size, 5, dtype=torch.float64)
    coverage = cover(model, synthesiser_like(Batch(x, None), model))
    expected = per_example_gradients(model, lambda y, _: y.sum(1), x, x)
    ios = record(model, coverage, Batch(x, x), size, lambda y, _: y.sum(1))
    for io in ios:
        for name, g in io.per_example().items():
            torch.testing.assert_close(g, expected[name])


def test_what_was_not_seen_at_attach_time_is_refused():
    model = scaled()
    x = torch.randn(4, 5)
    coverage = cover(model, synthesiser_like(Batch(x, None), model))

    def other(m, x):
        return scaled_rows(m, x) + (m.table(torch.arange(3)).mean() - x).mean()

    model._function = other
    with pytest.raises(CoverageError, match="not seen when it was attached"):
        Recording(model, coverage.covered, 4).forward((x,), {})


def test_a_model_that_asks_about_the_value_is_followed():
    def forward(m, x):
        table = m.table(torch.arange(6))
        assert table.shape == (6, 5)
        assert (len(table), table.dim(), table.numel()) == (6, 2, 30)
        assert table.is_floating_point()
        assert table.dtype == m.head.weight.dtype
        size = float(table.detach().abs().max())
        first, *_ = table.mT.unbind(1)
        return m.head(x + first / size)

    model = Custom(forward, table=nn.Embedding(6, 5), head=nn.Linear(5, 3))
    assert covered(model, 5).keys() == {"table", "head"}


def test_a_value_that_is_flattened_with_the_batch_is_refused():
    def forward(m, x):
        rows = x.flatten(0, 1) + m.table(torch.arange(6)).repeat(len(x), 1)
        return m.head(rows.view(x.shape).mean(1))

    model = Custom(forward, table=nn.Embedding(6, 5), head=nn.Linear(5, 3))
    message = refused(CoverageError, "cannot be followed", model, 6, 5)
    assert "'table.weight'" in message


def test_a_shared_output_is_refused():
    def forward(m, x):
        return m.head(x), m.table(torch.arange(6)).permute(1, 0)

    model = Custom(forward, table=nn.Embedding(6, 5), head=nn.Linear(5, 3))
    with pytest.raises((CouplingError, CoverageError)):
        covered(model, 5, loss=None)


def test_copies_look_like_one_of_them():
    hidden = torch.arange(3.0).expand(4, 3).clone().requires_grad_()
    copies = Copies.of(hidden, Meetings())
    assert copies.shape == (3,)
    assert isinstance(copies * 2, Copies)
    met = torch.zeros(4, 3) + copies
    assert not isinstance(met, Copies)
    (torch.arange(4.0)[:, None] * met).sum().backward()
    assert torch.equal(hidden.grad, torch.arange(4.0)[:, None].expand(4, 3))
