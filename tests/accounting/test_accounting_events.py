"""Events are immutable facts that survive JSON and refuse what they cannot be."""

import dataclasses
import json
import math

import pytest

from curvedp.accounting import (
    ComposedEvent,
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    event_from_json,
    repeated,
    tally,
)
from curvedp.errors import ConfigurationError, UnknownEventError

STEP = PoissonGaussianEvent(1.1, 256 / 60000)
OTHER = GaussianEvent(3.0)


@pytest.mark.parametrize(
    "event",
    [
        OTHER,
        STEP,
        repeated(STEP, 7),
        ComposedEvent(((repeated(STEP, 2), 3), (OTHER, 0))),
    ],
)
def test_json_round_trip_is_exact(event):
    assert event_from_json(json.loads(json.dumps(event.to_json()))) == event


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf, True, "1", None])
def test_impossible_noise_is_refused(sigma):
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        GaussianEvent(sigma)
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        PoissonGaussianEvent(sigma, 0.1)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, math.nan, True, "0.1"])
def test_impossible_rate_is_refused(rate):
    with pytest.raises(ConfigurationError, match="sample_rate"):
        PoissonGaussianEvent(1.0, rate)


@pytest.mark.parametrize("count", [-1, 1.0, True, None])
def test_impossible_count_is_refused(count):
    with pytest.raises(ConfigurationError, match="count"):
        repeated(STEP, count)


def test_composition_of_something_else_is_refused():
    with pytest.raises(ConfigurationError, match="not an event"):
        ComposedEvent((("gaussian", 1),))


def test_unknown_kind_is_refused_also_inside_a_composition():
    with pytest.raises(UnknownEventError, match="laplace"):
        event_from_json({"kind": "laplace", "scale": 1.0})
    with pytest.raises(UnknownEventError, match="laplace"):
        event_from_json(
            {"kind": "composed", "parts": [{"event": {"kind": "laplace"}, "count": 1}]}
        )


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"kind": 3},
        {"kind": "gaussian"},
        {"kind": "gaussian", "noise_multiplier": "1"},
        {"kind": "gaussian", "noise_multiplier": -1},
        {"kind": "composed", "parts": 3},
        {"kind": "composed", "parts": [3]},
        {"kind": "composed", "parts": [{"event": STEP.to_json()}]},
    ],
)
def test_malformed_json_is_refused(data):
    with pytest.raises(ConfigurationError):
        event_from_json(data)


def test_events_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        STEP.sample_rate = 0.5


def test_tally_counts_equal_events_through_nesting():
    nested = ComposedEvent(((repeated(STEP, 2), 3), (OTHER, 1)))
    total = tally([STEP, nested, PoissonGaussianEvent(1.1, 256 / 60000)])
    assert total.parts == ((STEP, 8), (OTHER, 1))
    assert tally([]).parts == ()


def test_two_events_cannot_share_a_kind():
    with pytest.raises(ConfigurationError, match="taken by GaussianEvent"):

        class Impostor(Event):
            kind = "gaussian"

    assert event_from_json(OTHER.to_json()) == OTHER
