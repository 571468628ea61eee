"""What can be known to fail is found when a run is attached, before it pays."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from curvedp import make_private
from curvedp.accounting import read_ledger
from curvedp.errors import CheckpointError, ConfigurationError, CurvedpError
from curvedp.recipes import get_recipe
from curvedp.train.rehearsal import rehearse

from ..faults.cases import attach, examples, parameters, train
from .loops import small_net, steps_of

RECIPE = get_recipe("dp-sgd")
EVERY = [
    kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
]


def payments(folder):
    """Of the ledger in a folder, if there is one."""
    ledger = folder / "ledger.jsonl"
    return read_ledger(ledger).count() if ledger.exists() else 0


def matrix():
    """A net without vectors, which Muon does not take."""
    torch.manual_seed(1)
    return nn.Linear(4, 3, bias=False)


def attached(folder, optimizer_of, model=None, **options):
    model = model or matrix()
    optimizer = optimizer_of(model.parameters())
    return attach(
        examples(), model, optimizer=optimizer, run_dir=folder, steps=2, **options
    )


@pytest.mark.parametrize("kind", EVERY, ids=lambda k: k.__name__)
def test_every_optimiser_of_torch_trains_or_is_refused_before_a_payment(kind, tmp_path):
    try:
        private = attached(tmp_path, kind)
    except CurvedpError as refusal:
        assert kind in (torch.optim.LBFGS, torch.optim.SparseAdam), refusal
        assert kind.__name__ in str(refusal)
        assert payments(tmp_path) == 0
        return
    with private:
        before = parameters(private.model)
        after = train(private)
        private.save()
        assert not torch.equal(after, before)
    assert payments(tmp_path) == 2


FLAGS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"maximize": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (torch.optim.Adam, {"capturable": True}),
    (torch.optim.Adam, {"differentiable": True}),
    (torch.optim.SGD, {"differentiable": True}),
    (torch.optim.SGD, {"lr": float("inf")}),
    (torch.optim.SGD, {"lr": 0.0}),
    (torch.optim.SGD, {"lr": 1e-12}),
]


@pytest.mark.parametrize(("kind", "flags"), FLAGS, ids=str)
def test_what_a_flag_breaks_is_found_at_attach(kind, flags, tmp_path):
    broken = flags.keys() & {"capturable", "differentiable"}
    broken |= {"lr"} if flags.get("lr") == float("inf") else set()

    def make(parameters):
        return kind(parameters, **flags)

    if broken:
        with pytest.raises(ConfigurationError, match=kind.__name__):
            attached(tmp_path, make, small_net())
        assert payments(tmp_path) == 0
        return
    with attached(tmp_path, make, small_net()) as private:
        train(private)
        private.save()
    with attached(tmp_path, make, small_net()) as again:
        again.resume()
        assert again.step == 2


class Failing(torch.optim.SGD):
    """Works until it has a state."""

    def step(self, closure=None):
        super().step()
        if self.state[self.param_groups[0]["params"][0]].setdefault("calls", 0):
            raise RuntimeError("the second step fails")
        self.state[self.param_groups[0]["params"][0]]["calls"] = 1


class Idle(torch.optim.SGD):
    def step(self, closure=None):
        pass


class NeedsLoss(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "this optimiser needs a closure"


class Unstorable(torch.optim.SGD):
    """Keeps in its state what a checkpoint without pickle cannot hold."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = {1, 2}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Failing, "the second step fails"),
        (Idle, "moves nothing"),
        (NeedsLoss, "needs a closure"),
        (Unstorable, "set in the state"),
    ],
)
def test_an_optimiser_that_cannot_work_is_refused_before_a_payment(
    kind, words, tmp_path
):
    with pytest.raises(CurvedpError, match=words):
        attached(tmp_path, lambda p: kind(p, lr=0.1))
    assert payments(tmp_path) == 0


class Uncopied(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.lock = open(os.devnull)  # noqa: SIM115

    def __del__(self):
        self.lock.close()


class ById(torch.optim.SGD):
    """Finds its buffers by the address of a parameter, which a copy does not have."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.rates = {id(p): lr for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.rates[id(p)])


@pytest.mark.parametrize("kind", [Uncopied, ById])
def test_one_that_cannot_be_copied_is_tried_by_its_signature(kind):
    private = attached(None, lambda p: kind(p, lr=0.1))
    assert "its step's signature alone" in str(private.statement())
    train(private)
    assert private.step == 2
    copied = attached(None, lambda p: torch.optim.SGD(p, lr=0.1))
    assert "its step's signature alone" not in str(copied.statement())


class NeedsMore(Uncopied):
    def step(self, loss):
        super().step()


def test_a_step_that_wants_arguments_is_refused_where_nothing_can_be_copied():
    with pytest.raises(ConfigurationError, match=r"NeedsMore.*\n.*step\(\)"):
        attached(None, lambda p: NeedsMore(p, lr=0.1))


def test_the_trial_leaves_optimiser_parameters_and_generators_alone():
    model = small_net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # state from the start
    scheduler = LambdaLR(optimizer, lambda step: step / 10)  # patches step, rate 0
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    rehearse(optimizer, RECIPE)
    assert torch.equal(torch.get_rng_state(), drawn)
    after = optimizer.state_dict(), model.state_dict()
    assert all(map(same, before, after))
    assert not calls
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.get_last_lr() == [0.0]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Draws(torch.optim.SGD):
    """Langevin noise from the global generator."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.data += 0.01 * torch.randn_like(p)


def test_the_trial_draws_nothing_of_the_runs_randomness():
    draws = Draws(small_net().parameters(), lr=0.1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rehearse(draws, RECIPE)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trial_takes_one_parameter_of_a_shape_in_each_group():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([[p.shape for p in g["params"]] for g in self.param_groups])
            super().step()

    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters()}]
    rehearse(Watching(groups, lr=0.1), RECIPE)
    assert seen[0] == [[(4, 4), (4,)], [(4, 4), (4,)]]


class Telling(nn.Linear):
    """Has an extra state."""

    def __init__(self, told):
        super().__init__(4, 3)
        self.told = told

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state


def test_a_model_that_no_checkpoint_can_hold_is_refused_before_a_payment(tmp_path):
    with pytest.raises(CheckpointError, match="stored"):
        attached(tmp_path, torch.optim.SGD, Telling({1, 2}))
    assert payments(tmp_path) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.jsonl"]
    attached(None, torch.optim.SGD, Telling({1, 2}))  # nothing is to be written


class Wide(nn.Linear):
    """Has a buffer of a type that safetensors does not know."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("waves", torch.zeros(3, dtype=torch.complex128))


def test_a_buffer_that_cannot_be_written_is_refused_before_a_payment(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be stored"):
        attached(tmp_path, torch.optim.SGD, Wide())
    assert payments(tmp_path) == 0


class Shared(nn.Module):
    """Buffers that share memory and are not contiguous."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("table", torch.arange(12.0).view(3, 4))
        self.register_buffer("turned", self.table.T)

    def forward(self, x):
        return self.layer(x)


def test_the_trial_of_the_folder_leaves_nothing_behind(tmp_path):
    with attached(tmp_path, torch.optim.SGD, Shared()):
        assert [p.name for p in tmp_path.iterdir()] == ["ledger.jsonl"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_journal_that_cannot_be_written_is_found_before_a_payment(tmp_path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal").chmod(0o500)
    with pytest.raises(CurvedpError, match="journal"):
        attached(tmp_path, torch.optim.SGD)
    assert payments(tmp_path) == 0
    (tmp_path / "journal").chmod(0o700)


def test_a_journal_whose_place_is_taken_is_found_before_a_payment(tmp_path):
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(CurvedpError, match="journal"):
        attached(tmp_path, torch.optim.SGD)
    assert payments(tmp_path) == 0


def test_an_optimiser_that_is_not_the_recipes_is_named():
    model = small_net()
    settings = {
        "loss": "cross-entropy", "noise_multiplier": 1.0, "sample_rate": 0.5,
        "steps": 2, "expected_batch_size": 10,
    }  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, sgd, examples(), recipe="dp-adam", **settings)
    (note,) = private.statement().facts["notes"]
    assert "SGD" in note and "Adam" in note and "dp-adam" in note
    assert note in str(private.statement())
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    private = make_private(model, adam, examples(), recipe="dp-adam", **settings)
    assert not private.statement().facts["notes"]


@pytest.mark.parametrize(
    ("recipe", "optimizer", "words"),
    [
        ("dp-adambc", torch.optim.Adam, "rests on SGD"),
        ("noisecurve", torch.optim.Adam, "rests on SGD"),
        ("noisecurve", lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), "momentum"),
    ],
)
def test_a_method_that_rests_on_its_optimiser_refuses_others(recipe, optimizer, words):
    with pytest.raises(ConfigurationError, match=words):
        attached(None, optimizer, small_net(), recipe=recipe)


def test_the_statement_says_what_was_not_tried(tmp_path):
    with attached(tmp_path, torch.optim.SGD) as private:
        text = str(private.statement())
        assert "schedule" in text and "not tried" in text


def test_a_tensor_as_rate_survives_the_journal(tmp_path):
    def adam(p):
        return torch.optim.Adam(p, lr=torch.tensor(0.01))

    with attached(tmp_path, adam) as private:
        steps = steps_of(private)
        while not private.step:
            next(steps)
        weights = parameters(private.model)
    with attached(tmp_path, adam) as again:
        again.resume()
        assert again.step == 1
        assert torch.equal(parameters(again.model), weights)
        assert isinstance(again.optimizer.param_groups[0]["lr"], torch.Tensor)


def test_an_attached_optimiser_is_not_attached_again():
    private = attached(None, torch.optim.SGD)
    model = private._engine.model
    with pytest.raises(ConfigurationError, match="attached already"):
        attach(examples(), model, optimizer=private.optimizer)
