"""Verdicts on ten architectures and more, each held against what training really does.

"ready" must train: a private step through ``make_private`` goes well. Anything else
must be refused by ``make_private``. "ready after --fix" must train once it is fixed.
"""

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

import curvedp
from curvedp.diagnostics import Verdict, diagnose, fix
from curvedp.errors import CurvedpError
from curvedp.layers import Batch, as_call, cover, synthesiser_like
from tests.diagnostics import architectures
from tests.diagnostics.architectures import MORE, TEN

#: What is known of each.
EXPECTED = {
    architectures.resnet: Verdict.READY_AFTER_FIX,
    architectures.vit: Verdict.READY,
    architectures.bert: Verdict.READY,
    architectures.gpt2: Verdict.READY,
    architectures.t5: Verdict.READY,
    architectures.lstm: Verdict.READY,
    architectures.unet: Verdict.READY,
    architectures.mixer: Verdict.READY,
    architectures.functional: Verdict.NOT_POSSIBLE,
    architectures.unused: Verdict.NOT_POSSIBLE,
    architectures.bert_without_pooler: Verdict.NOT_POSSIBLE,
    architectures.mixed: Verdict.NOT_POSSIBLE,
    architectures.repairable: Verdict.READY_AFTER_FIX,
    architectures.overwriting: Verdict.READY_AFTER_FIX,
    architectures.centred: Verdict.NOT_POSSIBLE,
    architectures.flat_batch_norm: Verdict.READY_AFTER_FIX,
    architectures.dead_convolution: Verdict.READY,
}


class Examples(Dataset):
    """Inputs of the shapes of an example batch, and targets that nobody reads."""

    def __init__(self, example):
        def draw(x):
            generator = torch.Generator().manual_seed(1)
            shape = (8, *x.shape[1:])
            if x.is_floating_point():
                return torch.randn(shape, generator=generator)
            return torch.randint(0, architectures.TOKENS, shape, generator=generator)

        self.inputs = tree_map(draw, example)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return tree_map(lambda x: x[i], self.inputs), 0


def private_step(model, inputs):
    """Attach and make one step; returns whether every trained weight has moved."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    private = curvedp.make_private(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        Examples(inputs),
        noise_multiplier=1.0,
        delta=1e-5,
        sample_rate=0.5,
        steps=1,
        expected_batch_size=4.0,
        unsafe_reproducible_noise=1,
    )
    for x, _ in private.loader:
        args, kwargs = as_call(x)
        output = private.model(*args, **kwargs)
        output.square().flatten(1).mean(1).mean().backward()
        private.optimizer.step()
    assert private.step == 1
    moved = {n: not torch.equal(p, before[n]) for n, p in model.named_parameters()}
    return all(moved.values())


def accepted(model, inputs):
    try:
        cover(model, synthesiser_like(Batch(inputs, None), model))
    except CurvedpError:
        return False
    return True


@pytest.mark.parametrize("make", [*TEN, *MORE], ids=lambda make: make.__name__)
def test_verdict_is_the_truth(make):
    model, inputs = make()
    found = diagnose(model, inputs=inputs)
    assert found.verdict is EXPECTED[make], str(found)
    assert found.ready == accepted(model, inputs)
    if found.ready:
        assert not found.problems
        assert not found.changes
        assert private_step(model, inputs)
        assert {layer.served_by for layer in found.layers}.isdisjoint(
            {"refused", "not checked"}
        )
        return
    assert found.problems
    assert all(p.problem and (p.advice or p.changes) for p in found.problems)
    with pytest.raises(CurvedpError):
        private_step(model, inputs)
    fixed, changes = fix(model)
    again = diagnose(fixed, inputs=inputs)
    assert again.ready == (found.verdict is Verdict.READY_AFTER_FIX)
    if again.ready:
        assert changes
        assert private_step(fixed, inputs)
    else:
        with pytest.raises(CurvedpError):
            private_step(fixed, inputs)


def test_what_is_refused_is_named():
    model, inputs = architectures.functional()
    (problem,) = diagnose(model, inputs=inputs).problems
    assert problem.names == ("shared",)
    assert "'shared.weight'" in problem.problem
    model, inputs = architectures.unused()
    (problem,) = diagnose(model, inputs=inputs).problems
    assert problem.names == ("spare",)
    assert "freeze" in problem.advice
    model, inputs = architectures.bert_without_pooler()
    (problem,) = diagnose(model, inputs=inputs).problems
    assert problem.names == ("pooler",)


def test_freezing_what_is_refused_is_enough():
    for make in (architectures.functional, architectures.unused):
        model, inputs = make()
        found = diagnose(model, inputs=inputs)
        for problem in found.problems:
            for name in problem.names:
                model.get_submodule(name).requires_grad_(False)
        assert diagnose(model, inputs=inputs).ready


def test_all_problems_are_reported():
    model, inputs = architectures.mixed()
    found = diagnose(model, inputs=inputs)
    about = {name for problem in found.problems for name in problem.names}
    assert about >= {"words", "norm", "instance", "spare"}
    fixable = {n for p in found.problems if p.fixable for n in p.names}
    assert fixable >= {"words", "norm", "instance"}
    assert "spare" not in fixable
    model, inputs = architectures.resnet()
    assert len(diagnose(model, inputs=inputs).problems) == 6


def test_a_gradient_that_is_always_zero_is_noted():
    model, inputs = architectures.bert()
    (note,) = [n for n in diagnose(model, inputs=inputs).notes if "zero" in n]
    assert "'layers.0.attention.key.bias', 'layers.1.attention.key.bias'. " in note
    model, inputs = architectures.mixer()
    (note,) = [n for n in diagnose(model, inputs=inputs).notes if "zero" in n]
    assert "'1.over_tokens.2.bias', '2.over_tokens.2.bias'. " in note
    for make in (architectures.vit, architectures.unet, architectures.lstm):
        model, inputs = make()
        assert not any("zero" in n for n in diagnose(model, inputs=inputs).notes)


def test_a_layer_that_cannot_learn_is_noted():
    model, inputs = architectures.dead_convolution()
    notes = [n for n in diagnose(model, inputs=inputs).notes if "zero" in n]
    assert any("'0.weight'" in n and "learns nothing" in n for n in notes)
