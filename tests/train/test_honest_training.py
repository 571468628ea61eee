"""A guard that refuses honest training is a defect: what ordinary models do passes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from ..faults.cases import attach, examples, parameters, train


def trained(model, **options):
    held = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(held, lr=0.1)
    private = attach(examples(), model, optimizer=optimizer, **options)
    before = parameters(model)
    train(private)
    assert private.step == 4
    assert not torch.equal(parameters(model), before)
    return private


def small_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    "norm", [spectral_norm, parametrizations.spectral_norm], ids=["hook", "parametrize"]
)
def test_spectral_norm(norm):
    model = small_net()
    model[0] = norm(model[0])
    u = next(b for n, b in model.named_buffers() if n.endswith("_u"))
    before = u.clone()
    trained(model)
    assert not torch.equal(u, before)  # its vectors follow the weights


class KeepsTerms(nn.Module):
    """A variational layer: its KL term and attention map stand in attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.mean, self.spread = nn.Linear(4, 6), nn.Linear(4, 6)
        self.attention, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.kl = None
        self.maps: list[torch.Tensor] = []

    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        self.kl = (mean.square() + spread.exp() - spread - 1).sum(1)
        weights = self.attention(mean + torch.randn_like(mean) * spread).softmax(1)
        self.maps = [weights.detach()]
        self.last_weights = weights
        return self.head(weights * mean)


def test_a_kl_term_and_attention_maps_last_until_the_backward_pass_has_ended():
    model = KeepsTerms()
    private = attach(examples(), model, loss=None)
    empty = model.maps
    for x, y in private.loader:
        output = private.model(x)
        assert model.maps[0].shape == (8, 6)
        loss = F.cross_entropy(output, y, reduction="none") + 0.1 * model.kl
        loss.mean().backward()
        private.optimizer.step()
        assert model.kl is None
        assert model.maps is empty and not empty
        assert not hasattr(model, "last_weights")
    assert private.step == 4


def test_a_kl_term_beside_a_counter():
    class Counts(KeepsTerms):
        calls = 0

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counts()
    private = attach(examples(), model, loss=None)
    for x, y in private.loader:
        step = private.step
        output = private.model(x)
        (F.cross_entropy(output, y) + model.kl.mean()).backward()
        private.optimizer.step()
        assert model.kl is None
        assert model.calls == step + 1  # and not of portions, which tell of records
    assert model.calls == private.step == 4


def test_an_average_of_the_weights_outside_of_the_model():
    model = small_net()
    average = copy.deepcopy(model)
    swa = torch.optim.swa_utils.AveragedModel(model)
    private = attach(examples(), model)
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        swa.update_parameters(model)
        # evaluated with the average in its place, and put back
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        model.load_state_dict(own)
    assert private.step == 4


class Taught(nn.Module):
    """A student and its teacher, which is moved between steps."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = small_net(), small_net().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) + 0.1 * wanted

    @torch.no_grad()
    def follow(self):
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for mean, p in pairs:
            mean.data.lerp_(p, 0.5)


@pytest.mark.parametrize("rows", [4, 24])
def test_a_teacher_inside_of_the_model_follows_in_every_turn_of_the_loop(rows):
    model = Taught()
    held = [p for p in model.parameters() if p.requires_grad]
    private = attach(
        examples(),
        model,
        optimizer=torch.optim.SGD(held, lr=0.1),
        physical_batch_size=rows,
    )
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()  # of a portion, or of a step
        model.follow()
    assert private.step == 4


class Adapted(nn.Module):
    """A frozen layer with an adapter, as peft writes it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.merged = False

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + self.up(self.down(x))

    def merge(self, sign=1):
        self.base.weight.data += sign * self.up.weight.data @ self.down.weight.data
        self.merged = sign == 1


def test_an_adapter_that_is_merged_to_be_evaluated():
    model = Adapted()
    held = [p for p in model.parameters() if p.requires_grad]
    private = attach(examples(), model, optimizer=torch.optim.SGD(held, lr=0.1))
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if private.optimizer.steps_done and not private._engine.inside_logical_batch:
            model.merge()
            private.model.eval()
            private.model(torch.ones(2, 4))
            private.model.train()
            model.merge(-1)
    assert private.step == 4


def test_gradients_accumulated_by_portions():
    private = attach(examples(), small_net(), physical_batch_size=4)
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        if private.batch_is_whole:
            private.optimizer.step()
    assert private.step == 4


class Rotated(nn.Module):
    """Builds its table and its mask when it first needs them, and counts its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.cache: dict[int, torch.Tensor] = {}
        self.mask = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1]).cos()
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.ones(len(x), 1)
        self.mask = torch.ones(x.shape[1])
        self.calls += 1
        return self.head(self.layer(x * self.table * self.mask) * self.cache[len(x)])


def test_tables_masks_and_counters_stay():
    model = Rotated()
    private = trained(model)
    assert model.table is not None
    assert 8 in model.cache
    assert int(model.calls) == private.step


def test_dropout_beside_a_counter():
    model = nn.Sequential(Rotated(), nn.Dropout(0.5), nn.Linear(3, 3))
    trained(model)
