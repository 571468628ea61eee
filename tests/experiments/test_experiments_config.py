from dataclasses import replace

import pytest

from curvedp.errors import ConfigurationError
from curvedp.experiments import RunConfig
from curvedp.experiments.config import DEFAULT_BATCH_SIZE, DEFAULT_EPOCHS


def test_tables_and_names_say_the_same():
    short = RunConfig.from_mapping({"data": "digits", "recipe": "dp-adam"})
    long = RunConfig.from_mapping(
        {"data": {"source": "digits"}, "recipe": {"name": "dp-adam"}}
    )
    assert short == long


def test_json_round_trip(config):
    assert RunConfig.from_json(config.to_json()) == config


def test_a_whole_file():
    config = RunConfig.from_mapping(
        {
            "data": {"source": "t.csv", "target": "y", "columns": {"a": {"low": 0}}},
            "model": {"name": "mlp", "width": 8},
            "recipe": {"name": "dp-sgd", "learning_rate": 1.0},
            "privacy": {"epsilon": 2, "batch_size": 10, "epochs": 1},
            "run": {"seed": 3, "metrics": "f1", "device": "cpu"},
        }
    )
    assert config.data_options["columns"] == {"a": {"low": 0}}
    assert config.model_options == {"width": 8}
    assert config.configured_recipe().learning_rate == 1.0
    assert config.metrics == ("f1",)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"data": "digits", "network": "cnn"}, "network"),
        ({"data": "digits", "privacy": {"epsilom": 1}}, "epsilom"),
        ({"data": "digits", "privacy": {"epsilon": "one"}}, "epsilon"),
        ({"data": "digits", "privacy": {"epochs": True}}, "epochs"),
        ({"data": "digits", "run": {"sede": 1}}, "sede"),
        ({"data": "digits", "run": {"device": "tpu"}}, "tpu"),
        ({"data": "digits", "run": {"metrics": ["precision"]}}, "precision"),
        ({"data": "digits", "run": {"checkpoint_every": 0}}, "checkpoint_every"),
        ({"data": "digits", "run": {"seed": -1}}, "seed"),
        ({"data": "digits", "run": 3}, "run"),
        ({"data": "digits", "recipe": "dp-sgdd"}, "dp-sgdd"),
        ({"data": "digits", "recipe": {"name": "dp-sgd", "lr": 1}}, "lr"),
        ({"data": 3}, "data"),
        ({}, "data"),
    ],
)
def test_unknown_and_impossible_settings_are_refused_by_name(table, named):
    with pytest.raises(ConfigurationError, match=named):
        RunConfig.from_mapping(table)


def test_settling_fixes_what_must_not_change_later():
    settled = RunConfig("digits").settled()
    assert settled.seed is not None
    assert settled.privacy == {
        "batch_size": DEFAULT_BATCH_SIZE,
        "epochs": DEFAULT_EPOCHS,
    }
    assert settled.settled() == settled
    by_rate = replace(settled, privacy={"sample_rate": 0.1, "steps": 3}).settled()
    assert "batch_size" not in by_rate.privacy
    assert RunConfig("digits", privacy={"epochs": 5}).settled().privacy == {
        "batch_size": DEFAULT_BATCH_SIZE,
        "epochs": 5,
    }
