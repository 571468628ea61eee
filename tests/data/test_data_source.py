import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from curvedp.data import (
    ArrayDataset,
    DataSource,
    Task,
    check_labels,
    load,
    parse_task,
    split_validation,
)
from curvedp.errors import ConfigurationError, DataError


def numbered(length: int) -> ArrayDataset:
    return ArrayDataset(
        torch.arange(length, dtype=torch.float32).view(-1, 1), torch.arange(length) % 3
    )


def source(**changes) -> DataSource:
    settings = {
        "name": "toy",
        "train": numbered(6),
        "test": None,
        "task": Task.CLASSIFICATION,
        "num_outputs": 3,
        "input_shape": (1,),
    }
    return DataSource(**(settings | changes))


def test_a_whole_batch_is_one_index():
    dataset = numbered(10)
    assert isinstance(dataset, TensorDataset)
    inputs, targets = dataset[torch.tensor([7, 2, 2])]
    assert inputs.flatten().tolist() == [7, 2, 2]
    assert targets.tolist() == [1, 2, 2]
    assert len(dataset) == 10


@pytest.mark.parametrize(
    "targets", [torch.zeros(4), torch.tensor(1.0)], ids=["short", "scalar"]
)
def test_inputs_and_targets_must_match(targets):
    with pytest.raises(DataError, match="differ in length"):
        ArrayDataset(torch.zeros(5, 2), targets)


def test_labels_in_range_pass():
    check_labels(numbered(9), 3)


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_refused_with_their_place(label):
    dataset = ArrayDataset(torch.zeros(4, 1), torch.tensor([0, 2, label, label]))
    with pytest.raises(DataError, match=r"example 2 lies outside 0\.\.2"):
        check_labels(dataset, 3)


@pytest.mark.parametrize("targets", [torch.zeros(4), torch.zeros(4, 1).long()])
def test_labels_of_another_kind_are_refused(targets):
    with pytest.raises(DataError, match="labels have shape"):
        check_labels(ArrayDataset(torch.zeros(4, 1), targets), 3)


def test_a_source_checks_both_parts():
    assert source(test=numbered(3)).num_classes == 3
    with pytest.raises(DataError, match="lies outside"):
        source(num_outputs=2)
    bad = ArrayDataset(torch.zeros(1, 1), torch.tensor([3]))
    with pytest.raises(DataError, match="lies outside"):
        source(test=bad)
    wide = ArrayDataset(torch.zeros(2, 4), torch.zeros(2).long())
    with pytest.raises(DataError, match=r"shape \(4,\)"):
        source(test=wide)


def test_a_source_without_examples_is_taken_only_where_it_may_be_empty(tmp_path):
    path = tmp_path / "none.npz"
    np.savez(path, x=np.zeros((0, 4), np.float32), y=np.zeros(0, np.int64))
    with pytest.raises(DataError, match="no examples"):
        load(path, num_classes=3)
    none = load(path, num_classes=3, may_be_empty=True)
    assert (len(none.train), none.input_shape, none.num_classes) == (0, (4,), 3)


def test_a_test_part_without_examples_is_refused():
    none = ArrayDataset(torch.zeros(0, 1), torch.zeros(0).long())
    with pytest.raises(DataError, match="no test examples"):
        source(test=none)


def test_a_regression_has_outputs_and_no_classes():
    train = ArrayDataset(torch.zeros(2, 1), torch.zeros(2, 2))
    regression = source(train=train, task=Task.REGRESSION, num_outputs=2)
    assert regression.num_outputs == 2
    with pytest.raises(ConfigurationError, match="has no classes"):
        _ = regression.num_classes
    with pytest.raises(DataError, match="a target has shape"):
        source(train=train, task=Task.REGRESSION, num_outputs=1)


def test_a_source_is_frozen():
    with pytest.raises(AttributeError):
        source().name = "other"  # type: ignore[misc]


def test_a_task_is_read_from_its_word():
    assert parse_task("multi-label") is Task.MULTI_LABEL
    with pytest.raises(ConfigurationError, match="classification, regression"):
        parse_task("ranking")


def test_a_split_is_a_partition_by_seed():
    dataset = numbered(1000)
    train, validation = split_validation(dataset, 0.2, seed=1)
    together = torch.cat([train.inputs, validation.inputs]).flatten()
    assert together.sort().values.tolist() == list(range(1000))
    # Five standard deviations of a binomial(1000, 0.2).
    assert abs(len(validation) - 200) < 64
    again = split_validation(dataset, 0.2, seed=1)[1]
    assert torch.equal(again.inputs, validation.inputs)
    other = split_validation(dataset, 0.2, seed=2)[1]
    assert other.inputs.flatten().tolist() != validation.inputs.flatten().tolist()


@pytest.mark.parametrize("length", [5, 15, 16, 17, 100])
def test_one_more_example_moves_nobody_else(length):
    shorter = split_validation(numbered(length), 0.4, seed=3)
    longer = split_validation(numbered(length + 1), 0.4, seed=3)
    for part, grown in zip(shorter, longer, strict=True):
        kept = grown.inputs[grown.inputs < length].flatten()
        assert kept.tolist() == part.inputs.flatten().tolist()


@pytest.mark.parametrize("place", [0, 40, 99])
def test_by_content_one_example_less_moves_nobody_else_wherever_it_stood(place):
    dataset = numbered(100)
    kept = torch.arange(100) != place
    fewer = ArrayDataset(dataset.inputs[kept], dataset.targets[kept])
    whole = split_validation(dataset, 0.4, seed=3, by_content=True)
    less = split_validation(fewer, 0.4, seed=3, by_content=True)
    lost = 0
    for part, smaller in zip(whole, less, strict=True):
        stays = part.inputs[part.inputs != place].flatten()
        assert stays.tolist() == smaller.inputs.flatten().tolist()
        lost += len(part) - len(smaller)
    assert lost == 1
    assert 20 < len(whole[1]) < 60
    other = split_validation(dataset, 0.4, seed=4, by_content=True)
    assert other[1].inputs.flatten().tolist() != whole[1].inputs.flatten().tolist()
    # by place it would move many
    by_place = split_validation(dataset, 0.4, seed=3), split_validation(fewer, 0.4, 3)
    moved = set(by_place[0][0].inputs.flatten().tolist()) ^ set(
        by_place[1][0].inputs.flatten().tolist()
    )
    assert len(moved - {place}) > 5 or place == 99


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fractions_outside_the_open_interval_are_refused(fraction):
    with pytest.raises(ConfigurationError, match="fraction is"):
        split_validation(numbered(10), fraction, seed=0)


def test_an_empty_part_is_refused():
    with pytest.raises(DataError, match="leaves one part empty"):
        split_validation(numbered(2), 1e-9, seed=0)
    with pytest.raises(DataError, match="leaves one part empty"):
        split_validation(numbered(2), 1 - 1e-9, seed=0)
