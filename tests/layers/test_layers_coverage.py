"""What cannot be private is refused, by name; what is accepted is left as it was."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from curvedp.errors import ConfigurationError, CouplingError, CoverageError, LoopError
from curvedp.layers import Batch, Recording, cover, synthesiser_like
from curvedp.layers.verify import EXAMPLES

TEMPLATE = Batch(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))


def cross_entropy(output, targets):
    return F.cross_entropy(output, targets, reduction="none")


def covered(model, *shape, loss=cross_entropy, dtype=torch.float32):
    """Cover a classifier of inputs ``shape``; the kinds of its sites by name."""
    inputs = torch.zeros(1, *shape, dtype=dtype)
    template = Batch(inputs, None if loss is None else TEMPLATE.targets)
    coverage = cover(model, synthesiser_like(template, model), loss)
    return {item.site.name: item.site.kind for item in coverage.covered}


def refused(error, named, model, *shape, **options):
    with pytest.raises(error, match=re.escape(named)) as caught:
        covered(model, *shape, **options)
    assert caught.value.advice, "a refusal says what to do"
    assert_untouched_hooks(model)
    return str(caught.value)


def assert_untouched_hooks(model):
    for module in model.modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            assert not getattr(module, kind), f"{kind} left on {module}"


class Custom(nn.Module):
    """A model whose forward pass is a function of its layers."""

    def __init__(self, forward, **layers):
        super().__init__()
        self._function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self._function(self, *inputs)


# -- layers that mix examples ----------------------------------------------------------


def batch_norm_net():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_is_refused_with_its_replacement(kind):
    model = nn.Sequential(nn.Linear(5, 4), kind(4), nn.Linear(4, 3))
    message = refused(CouplingError, "'1'", model, 5)
    assert "GroupNorm" in message


def test_batch_norm_in_evaluation_mode_but_trainable_is_refused():
    model = batch_norm_net()
    model[1].eval()
    refused(CouplingError, "'1'", model, 5)


def test_frozen_batch_norm_in_evaluation_mode_is_accepted():
    model = batch_norm_net()
    model[1].requires_grad_(False).eval()
    model[1].running_mean.fill_(0.3)
    assert covered(model, 5) == {"0": "Linear", "2": "Linear"}
    assert not model[1].training
    assert torch.all(model[1].running_mean == 0.3)


def test_instance_norm_with_running_statistics_is_refused():
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), norm, nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 2, 6))
    refused(CouplingError, "'1'", model, 2, 6)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_look_at_the_batch_are_refused(option):
    table = nn.Embedding(7, 4, **option)
    model = Custom(
        lambda m, x: m.head(m.table(x).mean(1)), table=table, head=nn.Linear(4, 3)
    )
    refused(CouplingError, "'table'", model, 5, dtype=torch.int64)


def test_a_layer_that_couples_examples_is_named():
    centre = Custom(lambda m, x: x - x.mean(0))
    model = nn.Sequential(nn.Linear(5, 4), centre, nn.Linear(4, 3))
    refused(CouplingError, "layer '1'", model, 5)
    # it is found without a loss too
    refused(CouplingError, "layer '1'", model, 5, loss=None)


def test_coupling_in_the_backward_pass_alone_is_found():
    class Coupled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + grad.mean(0)

    model = Custom(
        lambda m, x: m.head(Coupled.apply(m.body(x))),
        body=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )
    with pytest.raises((CouplingError, CoverageError), match="'body"):
        covered(model, 5)


def test_a_scalar_loss_is_refused():
    message = refused(
        ConfigurationError, "batch of 3", nn.Linear(5, 3), 5, loss=F.cross_entropy
    )
    assert "one loss per example" in message


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: cross_entropy(o, y) / cross_entropy(o, y).sum().detach(),
        lambda o, y: cross_entropy(o - o.mean(0), y),
        lambda o, y: cross_entropy(o, y) * (1 + (y == y[0]).float().mean()),
    ],
    ids=["normalised", "centred", "weighted-by-count"],
)
def test_a_loss_that_couples_examples_is_refused(loss):
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30))
    refused(CouplingError, "the loss couples examples", model, 5, loss=loss)


def test_an_output_without_a_batch_dimension_is_refused():
    model = Custom(lambda m, x: m.layer(x).mean(), layer=nn.Linear(5, 3))
    refused(CouplingError, "its first dimension is not the batch", model, 5, loss=None)


# -- parameters in the wrong place -----------------------------------------------------


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


def test_a_shape_that_cannot_be_followed_is_refused():
    # a shared embedding, used as if its first dimension were time
    model = Custom(
        lambda m, x: m.head((x + m.table(torch.arange(6))[:, :5].mean(0)).mean(1)),
        table=nn.Embedding(6, 5),
        head=nn.Linear(5, 3),
    )
    refused(CoverageError, "cannot be followed", model, 6, 5)


# -- buffers ---------------------------------------------------------------------------


def counting(m, x):
    m.seen += 1
    return m.layer(x)


def replacing(m, x):
    m.seen = m.seen + x.detach().mean()
    return m.layer(x)


def registering(m, x):
    m.register_buffer("cache", x.detach().clone())
    return m.layer(x)


@pytest.mark.parametrize("forward", [counting, replacing, registering])
def test_a_buffer_that_changes_is_refused_and_put_back(forward):
    model = Custom(forward, layer=nn.Linear(5, 3))
    model.register_buffer("seen", torch.zeros(()))
    buffer = model.seen
    named = "cache" if forward is registering else "seen"
    refused(CouplingError, f"'{named}'", model, 5)
    assert dict(model.named_buffers()).keys() == {"seen"}
    assert model.seen is buffer
    assert float(model.seen) == 0


def test_a_buffer_that_changes_later_is_refused_in_the_private_pass():
    model = Custom(lambda m, x: m.layer(x), layer=nn.Linear(5, 3))
    model.register_buffer("seen", torch.zeros(()))
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    model._function = counting
    with pytest.raises(CouplingError, match="'seen'"):
        Recording(model, coverage.covered, 2).forward((torch.zeros(2, 5),), {})
    assert_untouched_hooks(model)


# -- the model is left exactly as it was -----------------------------------------------


def lively_net():
    return nn.Sequential(
        nn.Linear(5, 4),
        nn.Dropout(0.5),
        nn.LayerNorm(4),
        nn.ReLU(True),
        nn.Linear(4, 3),
    )


def snapshot(model):
    return {
        "modes": [m.training for m in model.modules()],
        "state": {n: t.clone() for n, t in model.state_dict().items()},
        "objects": [id(p) for p in model.parameters()],
        "trainable": [p.requires_grad for p in model.parameters()],
    }


def assert_same(model, before):
    after = snapshot(model)
    for name in ("modes", "objects", "trainable"):
        assert after[name] == before[name]
    for name, value in before["state"].items():
        assert torch.equal(after["state"][name], value)
    assert all(p.grad is None for p in model.parameters())
    assert_untouched_hooks(model)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("broken", [True, False])
def test_covering_leaves_model_and_random_state_alone(training, broken):
    model = lively_net().train(training)
    model[1].train(not training)  # a mixture of modes comes back too
    model[0].bias.requires_grad_(False)
    before, state = snapshot(model), torch.get_rng_state()
    loss = F.cross_entropy if broken else cross_entropy
    if broken:
        with pytest.raises(ConfigurationError):
            covered(model, 5, loss=loss)
    else:
        covered(model, 5)
    assert_same(model, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_recorded_pass_leaves_the_model_alone():
    model = lively_net()
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    before = snapshot(model)
    recording = Recording(model, coverage.covered, 2)
    output = recording.forward((torch.randn(2, 5),), {})
    assert_untouched_hooks(model)
    cross_entropy(output, torch.zeros(2, dtype=torch.int64)).sum().backward()
    recording.layer_ios()
    assert_same(model, before)


def test_a_forward_pass_that_fails_leaves_no_hooks():
    model = lively_net()
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        Recording(model, coverage.covered, 2).forward((torch.randn(2, 6),), {})
    assert_same(model, before)


# -- what the private pass itself refuses ----------------------------------------------


def recorded(model, x, size):
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    recording = Recording(model, coverage.covered, size)
    return recording, recording.forward((x,), {})


def test_a_batch_of_another_size_than_declared_is_refused():
    recording, output = recorded(nn.Linear(5, 3), torch.randn(4, 5), size=3)
    output.sum().backward()
    with pytest.raises(CouplingError, match="not the batch of 3"):
        recording.layer_ios()


def test_backward_twice_is_refused():
    recording, output = recorded(nn.Linear(5, 3), torch.randn(2, 5), size=2)
    output.sum().backward(retain_graph=True)
    with pytest.raises(LoopError, match="twice"):
        output.sum().backward()
    assert recording.reached


def test_an_input_modified_after_its_layer_is_refused():
    def forward(m, x):
        h = x * 1
        out = m.a(h)
        h.mul_(0)
        return out

    model = Custom(forward, a=nn.Linear(5, 3))
    with pytest.raises(LoopError, match="'a'"):
        covered(model, 5)


def test_layer_values_never_show_in_a_repr():
    recording, output = recorded(nn.Linear(5, 3), torch.full((2, 5), 1234.5), size=2)
    output.sum().backward()
    (io,) = recording.layer_ios()
    assert repr(io) == "DenseIO('')"


def test_a_rectifier_that_is_off_for_a_few_examples_is_not_dead():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))
    nn.init.constant_(model[0].weight, -0.1)  # the check's inputs are not negative
    nn.init.constant_(model[0].bias, -0.1)
    assert covered(model, 4).keys() == {"0", "2"}
