"""What the report says beside its verdict, and what the doctor leaves alone."""

import json

import pytest
import torch
from torch import nn

from curvedp.diagnostics import Verdict, diagnose, fix
from curvedp.errors import ConfigurationError
from tests.diagnostics import architectures


def rows(model, inputs, **options):
    found = diagnose(model, inputs=inputs, **options)
    return {layer.name: layer for layer in found.layers}, found


def test_servers_and_norms_come_from_the_shapes_seen():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(64, 64), nn.Linear(64, 3)
            self.uneven = nn.Linear(4, 64)
            self.token = nn.Parameter(torch.zeros(1, 1, 64))
            self.act, self.head = nn.PReLU(), nn.Linear(3, 2)

        def forward(self, x):
            h = self.wide(x + self.token) + self.uneven(x[..., :4])
            return self.head(self.narrow(self.act(h)).mean(1))

    layers, found = rows(Net(), torch.zeros(2, 8, 64))
    assert found.verdict is Verdict.READY
    shown = {n: (x.served_by, x.norms) for n, x in layers.items()}
    assert shown["wide"] == ("rule", "gram")
    assert shown["narrow"] == ("rule", "written")
    assert shown["head"] == ("rule", "product")
    assert shown["(the model itself)"] == ("expanded", "written")
    assert shown["act"][0] == "vmap"
    assert layers["wide"].inputs == (8, 64)
    assert layers["wide"].parameters == 64 * 65
    # 6 T p r; and 2 T^2 (p + r), with squares of all inputs and of the Gram matrix
    cost = layers["wide"].cost
    assert cost.base_flops == 256 * 6 * 8 * 64 * 64
    assert cost.extra_flops == 256 * 2 * (8 * 8 * (64 + 64 + 1) + 8 * (64 + 64))
    assert cost.kept_bytes == 256 * 8 * 64 * 4
    assert any("vmap" in note for note in found.notes)


def test_costs_grow_with_the_batch():
    model, inputs = architectures.vit()
    one, many = (diagnose(model, inputs=inputs, batch_size=n).cost for n in (1, 64))
    assert many.base_flops == pytest.approx(64 * one.base_flops)
    assert many.extra_flops == pytest.approx(64 * one.extra_flops)
    assert many.kept_bytes == pytest.approx(64 * one.kept_bytes)
    assert 0 < one.extra_flops < one.base_flops
    for wrong in (0, -1, True):
        with pytest.raises(ConfigurationError):
            diagnose(model, inputs=inputs, batch_size=wrong)


def test_the_base_flops_are_those_of_torch():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(32, 2)
    )
    found = diagnose(model, inputs=torch.zeros(2, 3, 4, 4), batch_size=1)
    forward = 2 * 4 * 27 * 8 + 2 * 32 * 2
    assert found.cost.base_flops == 3 * forward


def test_the_model_and_the_random_state_are_left_alone():
    model, inputs = architectures.resnet()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    flags = [m.training for m in model.eval().modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    diagnose(model, inputs=inputs)
    assert torch.equal(torch.rand(3), expected)
    fix(model)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert isinstance(model[1], nn.BatchNorm2d)
    assert model[2].inplace


def test_a_loss_that_mixes_examples_is_found():
    model, inputs = nn.Linear(5, 4), torch.zeros(2, 5)
    targets = torch.zeros(2, dtype=torch.long)
    assert diagnose(model, inputs=inputs, targets=targets, loss="cross-entropy").ready

    def softmax_over_the_batch(output, targets):
        return -output.log_softmax(0)[:, 0]

    found = diagnose(model, inputs=inputs, targets=targets, loss=softmax_over_the_batch)
    assert found.verdict is Verdict.NOT_POSSIBLE
    assert "loss couples examples" in found.problems[0].problem


def test_the_report_is_json_and_text():
    model, inputs = architectures.mixed()
    found = diagnose(model, inputs=inputs)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["verdict"] == "not possible"
    assert document["problems"][0]["fixable"] in (True, False)
    assert "spare" in str(found)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (nn.Linear(5, 2), {}),
        (nn.Linear(5, 2), {"inputs": torch.zeros(2, 7)}),
        (nn.Linear(5, 2), {"inputs": torch.tensor(1.0)}),
        (nn.Linear(5, 2), {"inputs": torch.zeros(2, 5), "loss": "mse"}),
        (nn.LazyLinear(2), {"inputs": torch.zeros(2, 5)}),
    ],
)
def test_what_is_not_about_privacy_is_an_error(model, options):
    with pytest.raises(ConfigurationError):
        diagnose(model, **options)


def test_a_model_with_nothing_to_train():
    found = diagnose(nn.Linear(5, 2).requires_grad_(False), inputs=torch.zeros(2, 5))
    assert found.verdict is Verdict.NOT_POSSIBLE
    assert "no trainable parameter" in found.problems[0].problem
    assert (found.trainable, found.frozen) == (0, 12)
