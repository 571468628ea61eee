"""Models that other libraries refuse, crash on or train wrongly without a word."""

from __future__ import annotations

import torch
from torch import nn

from curvedp.errors import CoverageError, LoopError
from curvedp.layers import verify

from .cases import Adapted, Positions, Twice, attach, examples, linear, train, trained
from .checking import assert_exact, one_step, refused, working


def inputs(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def broadcast_positions_are_exact():
    # as many positions as examples: reading one as the other would fit all shapes
    length = verify.EXAMPLES
    torch.manual_seed(0)
    assert_exact(Positions(length), inputs(length, length, 4))


def a_module_called_twice_is_exact():
    torch.manual_seed(0)
    assert_exact(Twice(), 3 * inputs(6, 4))


def bias_free_layers_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 3, bias=False),
    )
    assert_exact(model, 3 * inputs(6, 2, 6))


def non_square_images_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, (3, 2), stride=(1, 2), padding=(1, 0)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(2 * 5 * 4, 3),
    )
    assert_exact(model, inputs(6, 1, 5, 8))


# -- adapters -------------------------------------------------------------------------


def adapters_are_exact():
    model = Adapted()
    assert_exact(model, inputs(6, 4), optimizer=trained(model))


def adapters_move_and_the_rest_stays():
    model = Adapted()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with working():
        train(attach(examples(), model, optimizer=trained(model)))
    for name, p in model.named_parameters():
        moved = not torch.equal(p, before[name])
        assert moved == p.requires_grad, f"{name} {'moved' if moved else 'never moved'}"


def _attached(way):
    model = Adapted(way)
    return attach(examples(), model, optimizer=trained(model))


def forgotten_adapter_is_refused():
    refused(CoverageError, "'lora_a.weight'", lambda: _attached("forgotten"))


def detached_adapter_is_refused():
    refused(CoverageError, "'lora_a', 'lora_b'", lambda: _attached("detached"))


def adapter_scaled_by_zero_is_refused():
    refused(
        CoverageError,
        "'lora_a.weight', 'lora_b.weight' is exactly zero",
        lambda: _attached("scaled by zero"),
    )


def optimiser_without_the_adapter_is_refused():
    """Built before the adapter was put in, which then never moves."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = trained(model)
    model.append(nn.Linear(4, 3))
    refused(
        CoverageError,
        "does not hold '2.weight'",
        lambda: attach(examples(), model, optimizer=optimizer),
    )


# -- what is changed after it was checked ---------------------------------------------


def _two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def _changed(change):
    model = _two_layers()
    model[0].requires_grad_(False)
    private = attach(
        examples(), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    change(model)
    return lambda: one_step(private)


def unfreezing_after_attaching_is_refused():
    refused(LoopError, "unfrozen", _changed(lambda m: m[0].requires_grad_(True)))


def freezing_after_attaching_is_refused():
    refused(LoopError, "was frozen", _changed(lambda m: m[2].requires_grad_(False)))


def exchanging_after_attaching_is_refused():
    def freeze_and_exchange(model):
        model[2] = nn.Linear(4, 3).requires_grad_(False)

    refused(LoopError, "no longer in the model", _changed(freeze_and_exchange))


def gradient_that_nobody_clipped_is_refused():
    """Torch's optimisers use what is in ``.grad``, of frozen parameters too."""

    def leave_a_gradient(model):
        model[0].weight.grad = torch.ones_like(model[0].weight)

    refused(LoopError, "nobody has clipped it", _changed(leave_a_gradient))


def models_over_several_devices_are_refused():
    refused(
        CoverageError,
        "DataParallel",
        lambda: attach(examples(), nn.DataParallel(linear())),
    )
