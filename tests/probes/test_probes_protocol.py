"""What every probe promises, and the provenance that it carries."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError
from curvedp.probes import Probe

from .examples import PROBES, seeded

EVERY_PROBE = pytest.mark.parametrize("name", PROBES)


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


@EVERY_PROBE
def test_a_probe_is_a_frozen_probe_of_known_provenance(name):
    probe, provenance = PROBES[name]
    assert isinstance(probe, Probe)
    assert probe.provenance is provenance
    first = dataclasses.fields(probe)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(probe, first, None)


@EVERY_PROBE
def test_the_generator_decides_everything(name):
    probe, _ = PROBES[name]
    first, other = probe.inputs(6, seeded(1)), probe.inputs(6, seeded(2))
    torch.manual_seed(99)
    assert same(first, probe.inputs(6, seeded(1)))
    assert not same(first, other)
    generator = seeded(1)
    assert same(first, probe.inputs(6, generator))
    assert not same(first, probe.inputs(6, generator))  # it goes on, not back


@EVERY_PROBE
def test_the_global_random_state_is_left_alone(name):
    probe, _ = PROBES[name]
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    probe.inputs(4, seeded())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@EVERY_PROBE
@pytest.mark.parametrize("size", [1, 5])
def test_tensors_are_plain_and_as_many_as_asked_for(name, size):
    probe, _ = PROBES[name]
    leaves = tree_leaves(probe.inputs(size, seeded()))
    assert leaves
    for tensor in leaves:
        assert tensor.device.type == "cpu"
        assert tensor.dtype in (torch.float32, torch.int64)
        assert len(tensor) == size
        assert not tensor.requires_grad
        assert torch.isfinite(tensor.float()).all()


@EVERY_PROBE
def test_shapes_do_not_depend_on_the_draw(name):
    probe, _ = PROBES[name]
    shapes = {
        tuple(tuple(t.shape) for t in tree_leaves(probe.inputs(2, seeded(seed))))
        for seed in range(8)
    }
    assert len(shapes) == 1


@EVERY_PROBE
def test_the_description_is_json_and_names_its_kind(name):
    probe, _ = PROBES[name]
    facts = probe.describe()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["kind"]


@EVERY_PROBE
@pytest.mark.parametrize("size", [0, -3, 2.0, True, None])
def test_a_batch_has_a_size(name, size):
    probe, _ = PROBES[name]
    with pytest.raises(ConfigurationError, match="was asked for"):
        probe.inputs(size, seeded())


@EVERY_PROBE
def test_a_generator_is_needed(name):
    probe, _ = PROBES[name]
    with pytest.raises(ConfigurationError, match=r"manual_seed"):
        probe.inputs(2, None)


ORDER = [
    Provenance.SYNTHETIC,
    Provenance.PUBLIC,
    Provenance.RELEASED,
    Provenance.ORACLE,
]


def test_only_an_oracle_is_not_public():
    assert [p for p in Provenance if not p.is_public] == [Provenance.ORACLE]


def test_the_weaker_provenance_wins():
    for (i, a), (j, b) in itertools.product(enumerate(ORDER), repeat=2):
        assert a.combine(b) is ORDER[max(i, j)]


def test_printed_names_of_provenances_are_fixed():
    # ledgers hold them
    assert [p.value for p in ORDER] == ["synthetic", "public", "released", "oracle"]
