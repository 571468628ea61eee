import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvedp.errors import ConfigurationError
from curvedp.models import StandardisedConv2d, build, names, options

IMAGES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 16, 24)]
SMALL = {"vit": {"dim": 24, "depth": 2}}
CASES = [(name, shape) for name in names() for shape in IMAGES] + [
    ("logreg", (7,)),
    ("mlp", (7,)),
    ("mlp", (3, 5)),
]
STANDARDISED = [("wrn-16-4", (3, 8, 8)), ("resnet-20", (1, 28, 28))]


def made(name, shape, num_outputs=5, **settings):
    torch.manual_seed(0)
    return build(name, shape, num_outputs, **(SMALL.get(name, {}) | settings))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_names_are_sorted_and_complete():
    assert names() == (
        "cnn",
        "dpkfc-mnist",
        "logreg",
        "mlp",
        "resnet-20",
        "small-cnn",
        "vit",
        "wrn-16-4",
    )


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("dpkfc-mnist", (1, 28, 28), 206_922),
        ("logreg", (1, 28, 28), 7_850),
        # 784*128+128 + 128*128+128 + 128*10+10
        ("mlp", (1, 28, 28), 118_282),
        # convolutions 448+4640+18496, norms 224, dense 32896+1290
        ("small-cnn", (3, 32, 32), 57_994),
        # The published nets with BatchNorm, whose scale and shift GroupNorm also has.
        ("wrn-16-4", (3, 32, 32), 2_748_890),
        ("resnet-20", (3, 32, 32), 272_474),
        # convolutions 160+4640, dense 32*2*2*32+32 and 330
        ("cnn", (1, 8, 8), 9_258),
    ],
)
def test_parameter_counts(name, shape, parameters):
    assert count(build(name, shape, 10)) == parameters


def test_parameters_of_the_transformer():
    dim, patches, hidden = 24, 4, 48
    block = 4 * dim + (4 * dim * dim + 3 * dim) + (2 * dim * hidden + hidden + dim)
    embed = 3 * 16 * dim + dim + dim + (patches + 1) * dim
    model = build("vit", (3, 8, 8), 5, dim=24, depth=2, heads=4, mlp_ratio=2)
    assert count(model) == embed + 2 * block + 2 * dim + dim * 5 + 5
    assert model.class_token.shape == (1, 1, dim)
    assert model.position.shape == (1, patches + 1, dim)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_outputs_and_gradients(name, shape):
    model = made(name, shape)
    output = model(torch.rand(3, *shape))
    assert output.shape == (3, 5)
    assert output.isfinite().all()
    F.cross_entropy(output, torch.tensor([0, 1, 4])).backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        # Far above what rounding leaves where a gradient is zero by structure.
        assert parameter.grad.abs().max() > 1e-6, label


def test_the_activation_of_the_dpkfc_net_changes_no_weight():
    relu, tanh = (
        made("dpkfc-mnist", (1, 8, 8)),
        made("dpkfc-mnist", (1, 8, 8), activation="tanh"),
    )
    for p, q in zip(relu.parameters(), tanh.parameters(), strict=True):
        assert torch.equal(p, q)
    kinds = [type(m) for m in tanh.modules()]
    assert kinds.count(nn.Tanh) == 3
    assert nn.ReLU not in kinds


@pytest.mark.parametrize(("name", "shape"), STANDARDISED)
def test_gradients_with_standardised_weights(name, shape):
    model = made(name, shape, weight_standardisation=True)
    F.cross_entropy(model(torch.rand(3, *shape)), torch.tensor([0, 1, 4])).backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.abs().max() > 1e-6, label
    kinds = {type(m) for m in model.modules() if isinstance(m, nn.Conv2d)}
    assert kinds == {StandardisedConv2d}
    plain = made(name, shape)
    assert count(model) == count(plain)
    assert StandardisedConv2d not in {type(m) for m in plain.modules()}


@pytest.mark.parametrize("name", names())
def test_an_output_depends_on_its_own_input_only(name):
    shape = (3, 16, 16)
    model = made(name, shape).double()
    batch = torch.rand(3, *shape, dtype=torch.float64)
    changed = batch.clone()
    changed[1] += 1
    before, after = model(batch), model(changed)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("name", names())
def test_each_module_is_called_once_and_owns_its_weights(name):
    shape = (3, 16, 16)
    model = made(name, shape)
    calls: dict[nn.Module, int] = {}

    def note(module, *_):
        calls[module] = calls.get(module, 0) + 1

    leaves = [m for m in model.modules() if not list(m.children())]
    for leaf in leaves:
        leaf.register_forward_hook(note)
    model(torch.rand(2, *shape))
    assert calls == dict.fromkeys(leaves, 1)
    assert not any(getattr(leaf, "inplace", False) for leaf in leaves)
    assert not any("BatchNorm" in type(leaf).__name__ for leaf in leaves)
    assert not list(model.buffers())
    everywhere = list(model.named_parameters(remove_duplicate=False))
    assert len(everywhere) == len(list(model.parameters()))


@pytest.mark.parametrize("name", names())
def test_training_and_evaluation_agree(name):
    model = made(name, (1, 8, 8))
    batch = torch.rand(2, 1, 8, 8)
    assert torch.equal(model.train()(batch), model.eval()(batch))


@pytest.mark.parametrize("name", names())
def test_weights_survive_saving(name):
    model = made(name, (1, 8, 8))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    other = build(name, (1, 8, 8), 5, **SMALL.get(name, {}))
    batch = torch.rand(2, 1, 8, 8)
    assert not torch.equal(model(batch), other(batch))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(model(batch), other(batch))


@pytest.mark.parametrize("name", names())
def test_gradients_of_single_examples_exist_under_vmap(name):
    shape = (1, 8, 8)
    model = made(name, shape)
    weights = dict(model.named_parameters())
    batch, labels = torch.rand(3, *shape), torch.tensor([0, 1, 4])

    def loss(parameters, one, label):
        out = torch.func.functional_call(model, parameters, (one.unsqueeze(0),))
        return F.cross_entropy(out, label.unsqueeze(0))

    # The fused attention kernel of the CPU has no batching rule; the plain one has.
    with sdpa_kernel(SDPBackend.MATH):
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
            weights, batch, labels
        )
    F.cross_entropy(model(batch), labels, reduction="sum").backward()
    for label, parameter in weights.items():
        assert torch.allclose(each[label].sum(0), parameter.grad, atol=1e-4), label


def test_options_change_the_model():
    assert options("mlp") == {"width": 128, "depth": 2, "activation": "tanh"}
    model = build("mlp", (4,), 2, width=8, depth=3, activation="tanh")
    assert [type(m).__name__ for m in model] == (
        ["Flatten"] + ["Linear", "Tanh"] * 3 + ["Linear"]
    )
    tanh = build("cnn", (1, 8, 8), 10, activation="tanh", width=4, dense=6)
    assert sum(isinstance(m, nn.Tanh) for m in tanh) == 3
    assert count(tanh) == (9 * 4 + 4) + (4 * 9 * 8 + 8) + (32 * 6 + 6) + (6 * 10 + 10)
    norms = [m for m in build("small-cnn", (1, 8, 8), 2) if isinstance(m, nn.GroupNorm)]
    assert [(m.num_groups, m.num_channels) for m in norms] == [
        (4, 16),
        (4, 32),
        (4, 64),
    ]


def test_groups_are_the_largest_divisor():
    def groups(model):
        return {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}

    assert groups(build("wrn-16-4", (3, 8, 8), 2)) == {16}
    assert groups(build("resnet-20", (3, 8, 8), 2)) == {16}
    assert groups(build("resnet-20", (3, 8, 8), 2, groups=12)) == {8}


def test_standardised_weights_have_mean_zero_and_unit_norm():
    torch.manual_seed(0)
    conv = StandardisedConv2d(3, 8, 3, padding=1).double()
    with torch.no_grad():
        conv.weight.mul_(7).add_(2)
    weight = conv.standardised_weight().flatten(1)
    assert torch.allclose(weight.mean(1), torch.zeros(8, dtype=torch.float64))
    fan_in = 27
    variance = weight.var(1, unbiased=False)
    assert torch.allclose(variance, torch.full_like(variance, 1 / fan_in))
    image = torch.rand(2, 3, 5, 5, dtype=torch.float64)
    plain = F.conv2d(image, conv.standardised_weight(), conv.bias, padding=1)
    assert torch.equal(conv(image), plain)
    scale = F.conv2d(image, conv.weight, conv.bias, padding=1)
    assert not torch.allclose(conv(image), scale)


def test_a_constant_kernel_keeps_a_finite_gradient():
    conv = StandardisedConv2d(1, 1, 3)
    nn.init.constant_(conv.weight, 0.5)
    conv(torch.rand(1, 1, 5, 5)).sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.isfinite().all()


def test_patches_are_cut_in_reading_order():
    model = build("vit", (2, 4, 6), 3, patch=2, dim=8, depth=1, heads=2)
    image = torch.arange(48.0).view(1, 2, 4, 6)
    patches = model._cut(image)
    assert patches.shape == (1, 6, 8)
    expected = image[0, :, 2:4, 2:4].flatten()
    assert torch.equal(patches[0, 4], expected)


def test_attention_equals_its_formula():
    torch.manual_seed(0)
    model = build("vit", (1, 8, 8), 3, dim=8, depth=1, heads=2).double()
    attention = model.blocks[0].attention
    x = torch.rand(2, 5, 8, dtype=torch.float64)
    parts = []
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (
            layer(x)[..., rows]
            for layer in (attention.query, attention.key, attention.value)
        )
        parts.append(((q @ k.mT) / math.sqrt(4)).softmax(-1) @ v)
    assert torch.allclose(attention(x), attention.proj(torch.cat(parts, -1)))


@pytest.mark.parametrize(
    ("name", "shape", "settings", "message"),
    [
        ("resnet-50", (3, 8, 8), {}, r"unknown model[\s\S]*cnn, dpkfc-mnist, logreg"),
        ("mlp", (4,), {"breadth": 3}, r"no option 'breadth'[\s\S]*width, depth"),
        ("logreg", (4,), {"width": 3}, r"no option 'width'[\s\S]*none"),
        ("mlp", (4,), {"width": "3"}, "width='3'"),
        ("mlp", (4,), {"width": True}, "width=True"),
        ("mlp", (4,), {"width": 0}, "width is 0"),
        ("mlp", (4,), {"depth": 0}, "depth is 0"),
        ("mlp", (4,), {"activation": "sine"}, r"'sine'[\s\S]*relu, tanh"),
        ("cnn", (4,), {}, "takes images"),
        ("cnn", (1, 3, 8), {}, "needs images of 4x4"),
        ("cnn", (1, 8, 8), {"dense": 0}, "dense is 0"),
        ("wrn-16-4", (3, 8, 7), {}, "needs images of 8x8"),
        ("resnet-20", (3, 4, 4), {}, "needs images of 8x8"),
        ("resnet-20", (3, 8, 8), {"groups": 0}, "groups is 0"),
        ("small-cnn", (3, 4, 8), {}, "needs images of 5x5"),
        ("wrn-16-4", (3, 8, 8), {"weight_standardisation": 1}, "standardisation=1"),
        ("vit", (1, 28, 30), {}, "cannot be cut into patches of 4"),
        ("vit", (1, 2, 2), {}, "needs images of 4x4"),
        ("vit", (1, 8, 8), {"heads": 5}, "not a multiple of heads"),
        ("vit", (1, 8, 8), {"depth": 0}, "depth is 0"),
        ("vit", (1, 8, 8), {"patch": -1}, "patch is -1"),
        ("logreg", (), {}, "all sizes are 1 or more"),
        ("logreg", (4, 0), {}, "all sizes are 1 or more"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name, shape, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        build(name, shape, 3, **settings)


def test_the_number_of_outputs_is_positive():
    with pytest.raises(ConfigurationError, match="0 outputs"):
        build("logreg", (4,), 0)


def test_options_of_an_unknown_model():
    with pytest.raises(ConfigurationError, match="unknown model"):
        options("lenet")
