"""Recurrent layers, attention, bags and checkpointing in ways nobody can follow."""

import pytest
import torch
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
from torch.utils.checkpoint import checkpoint

from curvedp.errors import CouplingError, CoverageError
from curvedp.layers import Batch, Recording, cover, synthesiser_like
from curvedp.layers.verify import EXAMPLES


def recurrent_model(forward, kind=nn.LSTM, **options):
    layer = kind(5, 4, batch_first=True, **options)
    return Custom(forward, recurrent=layer, head=nn.Linear(4, 3))


def test_a_packed_sequence_is_refused_with_the_way_out():
    def forward(m, x):
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return m.head(m.recurrent(packed)[1][0][-1])

    model = recurrent_model(forward)
    message = refused(CoverageError, "'recurrent' (LSTM)", model, 6, 5)
    assert "PackedSequence" in message
    assert "mask" in message


def test_a_recurrent_layer_without_a_batch_is_refused():
    def forward(m, x):
        rows = [m.recurrent(one)[0][-1] for one in x]
        return m.head(torch.stack(rows))

    refused(CouplingError, "'recurrent' (GRU)", recurrent_model(forward, nn.GRU), 6, 5)


@pytest.mark.parametrize("time", [EXAMPLES, EXAMPLES + 1])
def test_a_recurrent_layer_that_takes_time_for_the_batch_is_refused(time):
    model = recurrent_model(lambda m, x: m.head(m.recurrent(x)[0][:, -1]))
    model.recurrent.batch_first = False
    with pytest.raises((CouplingError, CoverageError)) as caught:
        covered(model, time, 5)
    assert "recurrent" in str(caught.value)


def test_a_recurrent_layer_with_a_forward_of_its_own_is_refused_by_name():
    class Halved(nn.LSTM):
        def forward(self, x):
            y, state = super().forward(x)
            return y / 2, state

    model = recurrent_model(lambda m, x: m.head(m.recurrent(x)[0][:, -1]), Halved)
    message = refused(CoverageError, "'recurrent' (Halved)", model, 6, 5)
    assert "recurrent.weight_ih_l0" in message


def test_a_recurrent_layer_that_computes_something_else_is_refused():
    model = recurrent_model(
        lambda m, x: m.head(m.recurrent(x)[0][:, -1]), nn.RNN, nonlinearity="relu"
    )
    model.recurrent.nonlinearity, model.recurrent.mode = "relu", "RNN_TANH"
    forward = model.recurrent.forward
    model.recurrent.forward = lambda x: tuple(2 * part for part in forward(x))
    refused(CoverageError, "'recurrent' (RNN) does not compute", model, 6, 5)
    assert "forward" in vars(model.recurrent), "what was patched stays patched"


@pytest.mark.parametrize("fails", [False, True])
def test_the_forward_of_a_recurrent_layer_comes_back(fails):
    model = recurrent_model(lambda m, x: m.head(m.recurrent(x)[0][:, -1]), num_layers=2)
    template = Batch(torch.zeros(1, 6, 5), TEMPLATE.targets)
    before, keys = snapshot(model), list(model.state_dict())
    coverage = cover(model, synthesiser_like(template, model), cross_entropy)
    recording = Recording(model, coverage.covered, 2)
    if fails:
        with pytest.raises(RuntimeError):
            recording.forward((torch.randn(2, 6, 7),), {})
    else:
        recording.forward((torch.randn(2, 6, 5),), {}).sum().backward()
        assert len(recording.layer_ios()) == 2
    assert "forward" not in vars(model.recurrent)
    assert list(model.state_dict()) == keys
    assert_same(model, before)


def attention_model(**options):
    return Custom(
        lambda m, x: m.head(m.attention(x, x, x)[0].mean(1)),
        attention=nn.MultiheadAttention(4, 2, **options),
        head=nn.Linear(4, 3),
    )


def test_dropout_inside_torchs_attention_is_refused_with_the_way_out():
    model = attention_model(dropout=0.5, batch_first=True)
    message = refused(CoverageError, "'attention' (MultiheadAttention)", model, 5, 4)
    assert "attention.dropout = 0.0" in message
    model.attention.dropout = 0.0
    assert covered(model, 5, 4)["attention"] == "vmap"


@pytest.mark.parametrize("time", [EXAMPLES, EXAMPLES + 1])
def test_torchs_attention_with_time_first_is_refused(time):
    message = refused(CouplingError, "'attention'", attention_model(), time, 4)
    assert "batch_first=True" in message


def test_bags_by_offsets_are_refused():
    model = Custom(
        lambda m, x: m.head(m.bag(x.flatten(), torch.arange(0, x.numel(), 5))),
        bag=nn.EmbeddingBag(7, 4),
        head=nn.Linear(4, 3),
    )
    refused(CouplingError, "'bag' (EmbeddingBag)", model, 5, dtype=torch.int64)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layer", [nn.Linear, nn.RNN])
def test_gradient_checkpointing_is_refused_by_name(reentrant, layer):
    def forward(m, x):
        x = x.clone().requires_grad_()
        h = checkpoint(m.body, x, use_reentrant=reentrant)
        return m.head((h if isinstance(h, torch.Tensor) else h[0]).mean(1))

    body = layer(5, 4) if layer is nn.Linear else layer(5, 4, batch_first=True)
    model = Custom(forward, body=body, head=nn.Linear(4, 3))
    message = refused(CoverageError, "layer 'body' runs under", model, 6, 5)
    assert "physical batch" in message


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_parameters_without_a_module_is_refused(reentrant):
    def forward(m, x):
        h = checkpoint(
            lambda y: (y * m.scale).tanh(), m.body(x), use_reentrant=reentrant
        )
        return m.head(h)

    model = Custom(forward, body=nn.Linear(5, 4), head=nn.Linear(4, 3))
    model.scale = nn.Parameter(torch.rand(4))
    with pytest.raises(CoverageError) as caught:
        covered(model, 5)
    assert caught.value.advice


def test_checkpointing_without_parameters_is_exact():
    def forward(m, x):
        return m.head(checkpoint(torch.tanh, m.body(x), use_reentrant=False))

    model = Custom(forward, body=nn.Linear(5, 4), head=nn.Linear(4, 3))
    assert covered(model, 5) == {"body": "Linear", "head": "Linear"}


def test_a_module_with_dropout_of_its_own_that_needs_vmap_is_refused():
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    model = Custom(
        lambda m, x: m.head(m.attention(x, x, x)[0].mean(1)),
        attention=attention,
        head=nn.Linear(4, 3),
    )
    with pytest.raises((CoverageError, CouplingError), match="attention"):
        covered(model, 5, 4)
