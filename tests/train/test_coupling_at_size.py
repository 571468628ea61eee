"""Examples that are tied together only where the run is: its size, precision, mode."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.errors import CouplingError
from curvedp.train import coupling

ROWS = 16


class Net(nn.Module):
    """A small net with something of one's own in the middle."""

    def __init__(self, middle, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.drop, self.middle = nn.Dropout(dropout), middle

    def forward(self, x):
        return self.head(self.drop(self.middle(torch.tanh(self.body(x)), self)))


class Middle(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, h, net):
        return self._function(h, net)


class Centred(torch.autograd.Function):
    """Nothing forward; gradients without their mean over a large batch backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0) if len(grad) >= 6 else grad


def centred(h):
    return h - h.mean(0)


def in_groups_of_four(h, net):
    if len(h) % 4:
        return h
    spread = h.view(-1, 4, h.shape[1]).std(1).mean(1)
    return h + spread.repeat_interleave(4)[:, None]


def within_capacity(h, net):
    """Two experts, each of which takes the eight rows that come first."""
    chosen = (h[:, 0] > h[:, 1]).long()
    places = nn.functional.one_hot(chosen, 2).cumsum(0).gather(1, chosen[:, None])
    return torch.where(places <= 8, h * (2.0 + chosen[:, None]), h)


def hooked(h, net):
    h = h.clone()
    if h.requires_grad and len(h) >= 8:
        h.register_hook(centred)
    return h


def ranked(h, net):
    return h * (1 + (h[:, 0].argsort().argsort() >= 8).float()[:, None])


def by_its_twins(h, net):
    if len(h) < 8:
        return h
    near = (h[:, None] - h).abs().amax(2) < 1e-4
    return h * near.sum(1, keepdim=True)


def drawn_by_contents(h, net):
    """A mask of as many draws as there are positive numbers in the batch."""
    out, positive = h.clone(), h > 0
    out[positive] = nn.functional.dropout(h[positive], 0.5)
    return out if len(h) >= 8 else h


TIED = {
    "eight rows": lambda h, net: centred(h) if len(h) >= 8 else h,
    "float32 in training": lambda h, net: (
        centred(h) if h.dtype == torch.float32 and net.training else h
    ),
    "groups of four": in_groups_of_four,
    "capacity": within_capacity,
    "backward pass": lambda h, net: Centred.apply(h),
    "tensor hook": hooked,
    "rank": ranked,
    "largest": lambda h, net: h / h.abs().max() if len(h) >= 8 else h,
    "twins": by_its_twins,
    "draws": drawn_by_contents,
}


def attach(model, *, augment=None, inputs=None, **options):
    torch.manual_seed(1)
    inputs = torch.randn(40, 6) if inputs is None else inputs
    data = TensorDataset(inputs, torch.randint(0, 4, (len(inputs),)))
    settings = {
        "loss": "cross-entropy",
        "noise_multiplier": 1.0,
        "sample_rate": 0.3,
        "steps": 5,
        "expected_batch_size": 12,
        "physical_batch_size": ROWS,
        **options,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return make_private(model, optimizer, data, augment=augment, **settings)


@pytest.mark.parametrize("loss", ["cross-entropy", None])
@pytest.mark.parametrize("kind", TIED)
def test_examples_that_are_tied_at_the_size_of_the_run_are_found(kind, loss):
    with pytest.raises(CouplingError, match="another example"):
        attach(Net(Middle(TIED[kind])), loss=loss)


def test_the_layer_that_ties_them_is_named():
    with pytest.raises(CouplingError, match="'middle'"):
        attach(Net(Middle(TIED["eight rows"])))
    with pytest.raises(CouplingError, match=r"backward pass.*'body"):
        attach(Net(Middle(TIED["backward pass"])))


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(CouplingError):
        attach(Net(Middle(TIED["rank"])), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_long_looks_say_how_far_they_are(monkeypatch, caplog):
    monkeypatch.setattr(coupling, "PATIENCE", -1.0)
    attach(nn.Linear(6, 4))
    assert "16 synthetic rows: pass 8 of 8" in caplog.text


def test_what_is_tied_under_autocast_alone_is_found():
    def under_autocast(h, net):
        short = torch.is_autocast_enabled(h.device.type)
        return (h * h.abs().mean(0)).to(h.dtype) if short else h

    attach(Net(Middle(under_autocast)))
    with pytest.raises(CouplingError):
        attach(Net(Middle(under_autocast)), precision="bf16")


def test_a_loss_that_counts_its_batch_from_eight_rows_on_is_found():
    def counting(output, targets):
        losses = nn.functional.cross_entropy(output, targets, reduction="none")
        return losses / (targets != 0).sum() if len(losses) >= 8 else losses

    with pytest.raises(CouplingError, match="the loss"):
        attach(Net(Middle(lambda h, net: h)), loss=counting)


@pytest.mark.parametrize("held", ["nowhere", "attribute", "closure"])
def test_randomness_of_its_own_hides_nothing(held):
    generator = np.random.default_rng(0)

    def noisy(h, net):
        drawn = {
            "nowhere": np.random.default_rng,
            "attribute": lambda: net.generator,
            "closure": lambda: generator,
        }[held]()
        noise = torch.from_numpy(drawn.normal(size=tuple(h.shape)))
        return centred(h) + noise.to(h.dtype) if len(h) >= 8 else h

    model = Net(Middle(noisy))
    model.generator = np.random.default_rng(0)
    found = "differ.*'middle'" if held == "nowhere" else "another example"
    with pytest.raises(CouplingError, match=found):
        attach(model)


def first_pass(private):
    x, y = next(iter(private.loader))
    return private.loss(private.model(x), y)


def test_a_mode_that_was_not_checked_is_checked_before_its_first_pass():
    def tied(h, net):
        return centred(h) if len(h) >= 8 and not net.drop.training else h

    model = Net(Middle(tied), dropout=0.1)
    private = attach(model)
    first_pass(private)
    model.drop.eval()
    with pytest.raises(CouplingError, match="another example"):
        first_pass(private)
    plain = Net(Middle(lambda h, net: h), dropout=0.1)
    private = attach(plain)
    plain.drop.eval()
    first_pass(private)
    assert not plain.drop.training


def test_autocast_around_the_loop_is_such_a_mode():
    def tied(h, net):
        return (h * h.abs().mean(0)).to(h.dtype) if len(h) >= 8 else h

    def under_autocast(h, net):
        return tied(h, net) if torch.is_autocast_enabled("cpu") else h

    for function in (under_autocast, lambda h, net: h):
        private = attach(Net(Middle(function), dropout=0.1))
        with torch.autocast("cpu", torch.bfloat16):
            if function is under_autocast:
                with pytest.raises(CouplingError, match="another example"):
                    first_pass(private)
            else:
                first_pass(private).backward()
                private.optimizer.step()


def mixup(x, generator):
    order = torch.randperm(len(x), generator=generator)
    return 0.7 * x + 0.3 * x[order]


def cutmix(x, generator):
    x = x.clone()
    if torch.rand(1, generator=generator) < 0.5:
        x[:, :2] = x[torch.randperm(len(x), generator=generator), :2]
    return x


def in_place(x, generator):
    x[1:, 0] += x[:-1, 0] * 0.1
    return x


@pytest.mark.parametrize(
    "augment", [mixup, cutmix, in_place, lambda x, generator: centred(x)]
)
def test_an_augmentation_that_mixes_rows_is_refused(augment):
    with pytest.raises(CouplingError, match="changes the views"):
        attach(Net(Middle(lambda h, net: h)), augment=augment, views=2)


def test_an_augmentation_that_draws_from_nowhere_is_refused():
    def noisy(x, generator):
        return x + torch.from_numpy(np.random.default_rng().normal(size=x.shape))

    with pytest.raises(CouplingError, match="called again"):
        attach(Net(Middle(lambda h, net: h)), augment=noisy)


OWN = np.random.default_rng(3)


@pytest.mark.parametrize(
    "augment",
    [
        lambda x, g: x + 0.1 * torch.randn(x.shape, generator=g),
        lambda x, g: x + 0.1 * torch.randn_like(x),
        lambda x, g: x * float(np.random.uniform()),
        lambda x, g: x * float(OWN.uniform()),
        lambda x, g: x.mul_((torch.rand(len(x), 1, generator=g) < 0.5).float()),
    ],
    ids=["given", "torch", "numpy", "own", "in place"],
)
@pytest.mark.parametrize("views", [1, 2])
def test_augmentations_of_single_rows_pass(augment, views):
    attach(Net(Middle(lambda h, net: h)), augment=augment, views=views)


def test_views_of_one_example_may_know_of_each_other():
    def paired(x, generator):
        pairs = x.view(-1, 2, *x.shape[1:])
        return torch.stack([pairs[:, 0], -pairs[:, 0]], 1).view(x.shape)

    attach(Net(Middle(lambda h, net: h)), augment=paired, views=2)


@pytest.mark.parametrize("name", ["flips", "crops", "flips-and-crops"])
def test_named_augmentations_pass(name):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))
    attach(model, augment=name, inputs=torch.rand(40, 3, 8, 8))


class Counted(nn.Module):
    """Keeps what ordinary models keep: a term of the loss, a counter, a cache."""

    def __init__(self):
        super().__init__()
        self.passes, self.seen, self.table = 0, [], None

    def forward(self, h, net):
        self.passes += 1
        self.seen.append(self.passes)
        if self.table is None:
            self.table = torch.linspace(0, 1, h.shape[1])
        self.term = h.square().mean()
        return h + self.table


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "bf16-kept"}, {"loss": None}]
)
@pytest.mark.parametrize("middle", [Counted, nn.Identity])
def test_ordinary_models_pass(middle, options):
    class Plain(Net):
        def forward(self, x):
            h = torch.tanh(self.body(x))
            h = self.middle(h, self) if middle is Counted else self.middle(h)
            return self.head(self.drop(h))

    model = Plain(middle(), dropout=0.3)
    private = attach(model, **options)
    assert not any("rounding that" in text for text in private.statement().caveats)


class Packed(nn.Module):
    """A frozen layer on the positions that are not empty: products by other rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, h, net):
        used, out = h[:, 0] > 0, torch.zeros_like(h)
        out[used] = self.layer(h[used])
        return h + out


@pytest.mark.parametrize("kind", ["by rows", "by nothing"])
def test_rounding_passes_and_the_statement_says_how_far_it_goes(kind):
    class Rounded(nn.Module):
        def forward(self, h, net):
            if kind == "by rows":
                return h * (1 + 2e-7 * (h.detach()[:, 0] > 0).sum())
            noise = np.random.default_rng().normal(size=tuple(h.shape))
            far = 1e-7 * (len(h) >= 8)  # as a GPU that adds up in any order
            return h * (1 + far * torch.from_numpy(noise).to(h.dtype))

    private = attach(Net(Rounded()))
    (said,) = [c for c in private.statement().caveats if "rounding that" in c]
    assert 1e-6 < private.optimizer._engine.coupling.effect < 0.01, said


def test_products_over_other_shapes_pass():
    attach(Net(Packed()))


def test_large_portions_are_checked_with_fewer_rows_and_the_statement_says_so():
    private = attach(nn.Linear(6, 4), physical_batch_size=8192)
    assert private.optimizer._engine.coupling.rows == 4096
    assert "4096 at a time (portions have 8192)" in str(private.statement())
