"""Probes from data: rows, labels, kinds of datasets, and what an oracle hides."""

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from curvedp.errors import ConfigurationError
from curvedp.probes import LabelledProbe, OracleProbe, PublicProbe

from .examples import pairs, seeded


class Listed:
    """A map-style dataset of anything."""

    def __init__(self, *examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        return self.examples[i]


def test_rows_come_without_replacement():
    probe = PublicProbe(torch.arange(20.0))
    for seed in range(5):
        assert len(set(probe.inputs(15, seeded(seed)).tolist())) == 15
    everything = probe.inputs(20, seeded())
    assert everything.sort().values.tolist() == list(range(20))
    assert everything.tolist() != list(range(20))


def test_every_row_is_as_likely():
    probe = PublicProbe(torch.arange(10))
    generator = seeded()
    drawn = torch.cat([probe.inputs(3, generator) for _ in range(2000)])
    counts = torch.bincount(drawn)
    assert (counts - 600).abs().max() < 100  # std about 20


def test_more_rows_than_there_are_must_be_allowed():
    with pytest.raises(ConfigurationError, match=r"asked for 21.*digits.*") as error:
        PublicProbe(pairs(20), name="digits").inputs(21, seeded())
    assert "allow_repeats" in error.value.advice
    probe = PublicProbe(torch.arange(20), allow_repeats=True)
    many = probe.inputs(2000, seeded())
    assert (torch.bincount(many) - 100).abs().max() < 60
    assert len(set(probe.inputs(20, seeded()).tolist())) == 20  # no need to repeat


def test_own_labels_belong_to_their_inputs():
    probe = PublicProbe(pairs())
    assert isinstance(probe, LabelledProbe)
    batch = probe.labelled(8, seeded())
    assert torch.equal(batch.inputs, probe.inputs(8, seeded()))
    assert torch.equal(batch.inputs[:, 0], batch.targets * 3.0)


@pytest.mark.parametrize(
    "dataset",
    [
        torch.zeros(5, 2),
        TensorDataset(torch.zeros(5, 2)),
        Listed(torch.zeros(2)),
        Listed({"x": torch.zeros(2)}),
    ],
)
def test_examples_without_labels_have_none(dataset):
    with pytest.raises(ConfigurationError, match="no labels"):
        PublicProbe(dataset).labelled(1, seeded())


def test_values_become_float32_and_int64():
    class Mixed:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return {
                "half": torch.zeros(2, dtype=torch.float16),
                "array": np.zeros(3),
                "byte": torch.zeros(1, dtype=torch.uint8),
                "number": 1.5,
                "flag": torch.tensor(True),
            }, 7

    batch = PublicProbe(Mixed()).labelled(3, seeded())
    found = {name: x.dtype for name, x in batch.inputs.items()}
    assert found == {
        "half": torch.float32,
        "array": torch.float32,
        "byte": torch.int64,
        "number": torch.float32,
        "flag": torch.bool,
    }
    assert batch.targets.dtype == torch.int64


def test_several_inputs_are_a_tuple():
    probe = PublicProbe(Listed(((torch.zeros(2), torch.ones(3)), 1)))
    batch = probe.labelled(1, seeded())
    assert isinstance(batch.inputs, tuple)
    assert [x.shape for x in batch.inputs] == [(1, 2), (1, 3)]


def test_a_collate_function_is_used():
    texts = Listed("ab", "cde")
    with pytest.raises(ConfigurationError, match="hold a str"):
        PublicProbe(texts).inputs(2, seeded())

    def lengths(examples):
        return torch.tensor([len(text) for text in examples])

    found = PublicProbe(texts, collate=lengths).inputs(2, seeded())
    assert sorted(found.tolist()) == [2, 3]


def test_examples_of_different_shapes_are_refused_by_name():
    probe = PublicProbe(Listed(torch.zeros(2), torch.zeros(3)), name="ragged")
    with pytest.raises(ConfigurationError, match="ragged do not make a batch"):
        probe.inputs(2, seeded())
    with pytest.raises(ConfigurationError, match="do not make a batch"):
        PublicProbe(Listed(object())).inputs(1, seeded())


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2)


@pytest.mark.parametrize("dataset", [Stream(), 5, None, {"x": 1}, "abc"])
def test_what_has_no_rows_is_refused(dataset):
    with pytest.raises(ConfigurationError, match="cannot draw rows"):
        PublicProbe(dataset)


@pytest.mark.parametrize("probe", [PublicProbe, OracleProbe])
def test_an_empty_dataset_is_refused(probe):
    with pytest.raises(ConfigurationError, match="empty"):
        probe(torch.zeros(0, 3))


def test_an_oracle_shows_neither_its_values_nor_their_number():
    secret = torch.full((17, 1), 31337.0)
    probe = OracleProbe(secret, name="patients")
    with pytest.raises(ConfigurationError) as error:
        probe.inputs(18, seeded())
    shown = f"{probe!r} {probe.describe()} {error.value}"
    assert "31337" not in shown
    assert "17" not in shown
    assert "patients" in shown


def test_public_rows_are_counted():
    assert PublicProbe(pairs(20)).describe()["rows"] == 20
