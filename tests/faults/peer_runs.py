"""What Opake and FlashDP got wrong without a word: resumed runs, crashes, block norms.

The failures are those of Opake's own audit and of FlashDP's code. Each has a check here
or in another file of this folder, and a fault that makes it fail.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.clipping import PerLayerClipping, bounded
from curvedp.errors import CheckpointError, ConfigurationError
from curvedp.layers import dense
from curvedp.noise import RandomStreams
from curvedp.plan import Plan
from curvedp.train import ledgers
from curvedp.train.engine import Engine
from curvedp.train.noise import RunNoise
from curvedp.train.private import Private

from . import checks
from .cases import Adapted, attach, examples, parameters, train, trained
from .checking import clipped_vector, one_step, pairs, refused, unusable, working
from .mutate import Fault, Patch

CYCLIC = {
    "recipe": "dp-bandmf",
    "bands": 2,
    "steps": 6,
    "unsafe_reproducible_noise": None,
}


@contextmanager
def _folder():
    with TemporaryDirectory() as folder:
        yield Path(folder) / "run"


def _groups(private, population=40):
    sampler = private._engine._loader._sampler
    return [sampler.members(step, population) for step in range(2)]


# -- what is resumed ------------------------------------------------------------------


def _train_to(private, step=2):
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if private.step == step:
            break


def _stopped(folder, step=2, **settings):
    """A run of a few steps, and the groups that its examples were in."""
    with attach(examples(), run_dir=folder, **settings) as private:
        _train_to(private, step)
        private.save()
        return _groups(private)


def resumed_examples_stay_in_their_groups():
    with _folder() as folder:
        before = _stopped(folder, **CYCLIC)
        with attach(examples(), run_dir=folder, **CYCLIC) as private:
            private.resume()
            same = map(np.array_equal, before, _groups(private))
            assert all(same), "another key: examples have changed their groups"


def other_groups_cost_what_they_add():
    """Without the secret groups are drawn anew: somebody may be in both of them."""
    with _folder() as folder:
        _stopped(folder, step=1, **CYCLIC)
        (folder / "secret.json").unlink()
        with attach(examples(), run_dir=folder, **CYCLIC) as private:
            private.resume()
            assert private.steps_left() < 5, "new groups are accounted as the old ones"


def resumed_run_has_its_rate():
    with _folder() as folder:
        attach(examples(), run_dir=folder, rate=0.5).close()
        refused(
            ConfigurationError,
            "sample_rate",
            lambda: attach(examples(), run_dir=folder, rate=0.25),
        )


def stored_state_has_its_rate():
    state = attach(examples(), rate=0.5).state_dict()
    private = attach(examples(), rate=0.25)
    refused(CheckpointError, "sample_rate", lambda: private.load_state_dict(state))


def resumed_adapter_has_its_weights():
    with _folder() as folder:

        def adapted():
            model = Adapted()
            options = {"optimizer": trained(model), "run_dir": folder}
            return attach(examples(), model, **options)

        with adapted() as private:
            _train_to(private)
            private.save()
            expected = parameters(private.model)
        with adapted() as private, working():
            private.resume()
            found = parameters(private.model)
        assert torch.equal(found, expected), "steps were paid and their weights lost"


def another_strategys_noise_is_not_taken_back():
    with attach(examples(), **CYCLIC) as private:
        _train_to(private)
        noise = private._engine.noise
        stored = noise.stored()
        noise.load(stored)
        assert noise._begin is not None
        noise.load({**stored, "digest": "of another strategy"})
        assert noise._begin is None, "noise of another strategy is taken back"


# -- what crashes, crashes unpaid -----------------------------------------------------


class _Tied(nn.Module):
    """An embedding whose table is the weight of the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids).mean(1)))


def tied_embeddings_train():
    data = pairs(torch.randint(0, 7, (24, 3)))
    private = attach(data, _Tied(), steps=2)
    with working():
        train(private)
    assert private._engine.ledger.count() == 2


def a_crash_before_the_sum_is_unpaid():
    private = attach(examples(), steps=2)
    original = bounded._weighted_sum.__code__

    def crash(ios, weights, parameters, whitener):
        raise RuntimeError

    bounded._weighted_sum.__code__ = crash.__code__
    try:
        one_step(private)
    except RuntimeError:
        pass
    finally:
        bounded._weighted_sum.__code__ = original
    assert private.step == 0
    assert private._engine.ledger.count() == 0, "a step that crashed was paid for"


# -- FlashDP --------------------------------------------------------------------------


def noise_does_not_depend_on_the_batch():
    for expected in (1, 100):
        plan = attach(examples(), expected_batch_size=expected, clip_norm=0.5).plan
        assert plan.noise_multiplier == 1.0
        model = nn.Linear(4, 400)
        optimizer = torch.optim.SGD(model.parameters(), lr=float(expected))
        settings = {"optimizer": optimizer, "expected_batch_size": expected}
        private = attach(unusable(4), model, clip_norm=0.5, **settings)
        noise = float(one_step(private).double().std())
        assert 0.9 < noise / 0.5 < 1.1, f"noise of {noise / 0.5:.2f} bounds on the sum"


def layers_share_the_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    one = TensorDataset(100 * torch.ones(1, 4), torch.zeros(1).long())
    total = clipped_vector(one, model, clipping="per-layer", clip_norm=0.7)
    assert total.double().norm() <= 0.7, "each layer has the whole bound"


FAULTS = [
    Fault(
        "groups of a resumed run from another key",
        resumed_examples_stay_in_their_groups,
        (Patch(RandomStreams.continue_run, "= groups, dict(past)", "= 1, dict(past)"),),
    ),
    Fault(
        "new groups accounted as the old ones",
        other_groups_cost_what_they_add,
        (Patch(RunNoise.__init__, "else streams.fingerprint()", 'else "same"'),),
    ),
    Fault(
        "a run that goes on at another rate",
        resumed_run_has_its_rate,
        (Patch(ledgers._refuse_other_settings, "if stored != value:", "if False:"),),
    ),
    Fault(
        "a state that goes on at another rate",
        stored_state_has_its_rate,
        (Patch(ledgers.refuse_other_facts, "if then != value:", "if False:"),),
    ),
    Fault(
        "a resumed adapter without its weights",
        resumed_adapter_has_its_weights,
        (
            Patch(
                Private._load,
                "load_state_dict({**model, **spoken})",
                "load_state_dict(\n                {n: v for n, v in model.items() if "
                '"lora" not in n},\n                strict=False,\n            )',
            ),
        ),
    ),
    Fault(
        "correlated noise of whatever strategy",
        another_strategys_noise_is_not_taken_back,
        (
            Patch(
                RunNoise.load,
                "all(stored.get(k) == v for k, v in own.items())",
                "True",
            ),
        ),
    ),
    Fault(
        "a tied weight under one of its names",
        tied_embeddings_train,
        (
            Patch(
                bounded._weighted_sum,
                "if name in found:\n            total",
                "if name in found and len(ios) > 1:\n            total",
            ),
            Patch(
                bounded._weighted_sum, "torch.zeros(p.shape,", "torch.zeros(p.dim(),"
            ),
        ),
    ),
    Fault(
        "20 paid before it is computed",
        a_crash_before_the_sum_is_unpaid,
        (
            Patch(
                Engine.batches,
                "self._walk = walk = object()",
                "self._walk = walk = object()\n"
                "    step, event = self.step, self.noise.event(self.step)\n"
                "    self.ledger.pay(step, self.ledger.next_attempt(step), event)",
            ),
        ),
    ),
    Fault(
        "noise of a sum over the root of the batch",
        noise_does_not_depend_on_the_batch,
        (
            Patch(
                Plan.mechanism,
                "GaussianMechanism(sigma, bound)",
                "GaussianMechanism(sigma / self.sampling.expected_batch_size**0.5, "
                "bound)",
            ),
        ),
    ),
    Fault(
        "norms that nobody computed",
        checks.contribution_is_bounded,
        (
            Patch(
                dense.outer_sq_norms,
                "return _sq_spread(a, d, bias)",
                "return torch.zeros(len(a), dtype=torch.float64)",
            ),
        ),
    ),
    Fault(
        "blocks clipped as if each were the whole",
        layers_share_the_bound,
        (
            Patch(
                PerLayerClipping.weights,
                " / math.sqrt(sq_norms.shape[0])",
                "",
            ),
        ),
    ),
]
