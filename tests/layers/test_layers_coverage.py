"""Every trainable parameter is served, or refused by name."""

import pytest
import torch
import torch.nn.functional as F
from covering import (
    TEMPLATE,
    Custom,
    assert_same,
    covered,
    cross_entropy,
    refused,
    snapshot,
)
from torch import nn

from curvedp.errors import CouplingError, CoverageError
from curvedp.layers import Batch, Recording, cover, synthesiser_like
from curvedp.layers.verify import EXAMPLES


def tied_model():
    model = Custom(
        lambda m, x: m.head(m.table(x).mean(1)),
        table=nn.Embedding(3, 4),
        head=nn.Linear(4, 3, bias=False),
    )
    model.head.weight = model.table.weight
    return model


def test_tied_weights_are_one_parameter_under_its_first_name():
    model = tied_model()
    template = Batch(torch.zeros(1, 5, dtype=torch.int64), TEMPLATE.targets)
    before = snapshot(model)
    coverage = cover(model, synthesiser_like(template, model), cross_entropy)
    assert coverage.parameters == ["table.weight"]
    assert coverage.layers == [["table.weight"]]
    assert [item.site.name for item in coverage.covered] == ["table", "head"]
    assert_same(model, before)
    assert model.head.weight is model.table.weight


def test_a_frozen_tie_is_accepted():
    model = tied_model()
    model.table.weight.requires_grad_(False)
    model.head.bias = nn.Parameter(torch.zeros(3))
    assert covered(model, 5, dtype=torch.int64) == {"head": "Linear"}


def test_a_module_under_two_names_comes_back_as_it_was():
    # torch.func.functional_call leaves the replaced tensors in such a module
    shared = nn.Linear(5, 5)
    model = Custom(
        lambda m, x: m.head(m.b(m.a(x))), a=shared, b=shared, head=nn.Linear(5, 3)
    )
    before = snapshot(model)
    assert covered(model, 5) == {"a": "Linear", "head": "Linear"}
    assert_same(model, before)
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    Recording(model, coverage.covered, 2).forward((torch.randn(2, 5),), {})
    assert_same(model, before)


def test_tied_layers_that_nothing_calls_are_refused():
    model = Custom(
        lambda m, x: m.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3), c=nn.Linear(5, 3)
    )
    model.c.weight, model.c.bias = model.b.weight, model.b.bias
    refused(CoverageError, "'b'", model, 5)


@pytest.mark.parametrize("also_called", [True, False])
def test_a_weight_used_outside_its_module_is_refused(also_called):
    def forward(m, x):
        h = m.body(m.table(x).mean(1))
        return F.linear(h, m.table.weight)

    def only_outside(m, x):
        return F.linear(m.body(F.embedding(x, m.table.weight).mean(1)), m.table.weight)

    model = Custom(
        forward if also_called else only_outside,
        table=nn.Embedding(3, 4),
        body=nn.Linear(4, 4),
    )
    message = refused(CoverageError, "table", model, 5, dtype=torch.int64)
    assert not also_called or "head.weight = layer.weight" in message


def test_a_layer_that_is_never_called_is_refused():
    model = Custom(lambda m, x: m.a(x), a=nn.Linear(5, 3), spare=nn.Linear(5, 3))
    refused(CoverageError, "'spare'", model, 5)
    model.spare.requires_grad_(False)
    assert covered(model, 5) == {"a": "Linear"}


def test_an_unused_parameter_is_refused():
    model = Custom(lambda m, x: m.a(x), a=nn.Linear(5, 3))
    model.spare = nn.Parameter(torch.zeros(4))
    refused(CoverageError, "spare", model, 5)


def test_a_layer_cut_off_from_the_loss_is_refused():
    model = Custom(
        lambda m, x: m.head(m.body(x).detach()),
        body=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )
    refused(CoverageError, "'body'", model, 5)


def test_a_layer_under_no_grad_is_refused():
    def forward(m, x):
        with torch.no_grad():
            h = m.body(x)
        return m.head(h)

    model = Custom(forward, body=nn.Linear(5, 4), head=nn.Linear(4, 3))
    refused(CoverageError, "'body'", model, 5)


@pytest.mark.parametrize("time", [EXAMPLES, EXAMPLES + 1, EXAMPLES - 1])
def test_time_before_batch_is_refused(time):
    # with as many positions as examples, shapes alone say nothing
    def forward(m, x):
        return m.head(m.body(x.transpose(0, 1)).tanh().transpose(0, 1).mean(1))

    model = Custom(forward, body=nn.Linear(5, 4), head=nn.Linear(4, 3))
    message = refused(CouplingError, "body", model, time, 5)
    assert time != EXAMPLES or "attributed to the wrong examples" in message


def test_zero_initialised_layers_hide_nothing():
    # with a zero head no gradient reaches the body, wrongly attributed or not
    def forward(m, x):
        return m.head(m.body(x.transpose(0, 1)).tanh().transpose(0, 1).mean(1))

    model = Custom(forward, body=nn.Linear(5, 4), head=nn.Linear(4, 3))
    nn.init.zeros_(model.head.weight)
    refused(CouplingError, "body", model, EXAMPLES, 5)


def test_a_zero_initialised_adapter_is_accepted():
    down, up = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
    nn.init.zeros_(up.weight)
    base = nn.Linear(5, 3).requires_grad_(False)
    model = Custom(
        lambda m, x: m.base(x) + m.up(m.down(x)), base=base, down=down, up=up
    )
    assert covered(model, 5) == {"down": "Linear", "up": "Linear"}


def test_a_model_without_trainable_parameters_is_refused():
    refused(CoverageError, "no trainable", nn.Linear(5, 3).requires_grad_(False), 5)


def test_a_subclass_with_a_forward_of_its_own_is_another_layer():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x) + self.weight.sum()

    kinds = covered(nn.Sequential(Doubled(5, 4), nn.Linear(4, 3)), 5)
    assert kinds["0"] != "Linear"


def test_the_explanation_names_every_site():
    model = nn.Sequential(nn.Linear(5, 4), nn.Bilinear(4, 4, 3))
    pair = Custom(lambda m, x: m.b(m.a(x), m.a(x)), a=model[0], b=model[1])
    coverage = cover(pair, synthesiser_like(TEMPLATE, pair), cross_entropy)
    lines = coverage.explain().splitlines()
    assert [line.split() for line in lines] == [
        ["a", "Linear", "weight,", "bias"],
        ["b", "vmap", "weight,", "bias"],
    ]


def test_a_linear_layer_on_a_shared_position_embedding():
    """Neither of the two sees a batch; both are broadcast over the examples."""
    model = Custom(
        lambda m, x: m.head((x + m.mix(m.table(torch.arange(6)))).tanh().mean(1)),
        table=nn.Embedding(6, 5),
        mix=nn.Linear(5, 5),
        head=nn.Linear(5, 3),
    )
    assert covered(model, 6, 5).keys() == {"table", "mix", "head"}


def test_a_module_whose_output_has_no_batch_is_refused_by_name():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 5))

        def forward(self):
            return self.table

    model = Custom(
        lambda m, x: m.head((x + m.positions()).mean(1)),
        positions=Table(),
        head=nn.Linear(5, 3),
    )
    refused(CoverageError, "'positions.table'", model, 4, 5)


def test_a_shared_embedding_whose_first_dimension_is_used_up():
    model = Custom(
        lambda m, x: m.head((x + m.table(torch.arange(6))[:, :5].mean(0)).mean(1)),
        table=nn.Embedding(6, 5),
        head=nn.Linear(5, 3),
    )
    assert covered(model, 6, 5).keys() == {"table", "head"}


def test_a_rectifier_that_is_off_for_a_few_examples_is_not_dead():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))
    nn.init.constant_(model[0].weight, -0.1)  # the check's inputs are not negative
    nn.init.constant_(model[0].bias, -0.1)
    assert covered(model, 4).keys() == {"0", "2"}
