"""What was done to the data, as immutable facts. No cost is computed here.

An event says which mechanism ran, never on what: it holds no batch, no count of
examples and no loss, so it may be written to a ledger and shown to anybody. Its cost
is the business of :mod:`curvedp.accounting.accountants`.

A new mechanism is one class here, with a ``kind`` of its own, and one conversion in
``accountants.py``. An accountant that has no conversion refuses the event.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from curvedp.accounting._validate import (
    check_count,
    check_noise,
    check_rate,
    check_repeats,
)
from curvedp.errors import ConfigurationError, UnknownEventError
from curvedp.values import is_number

__all__ = [
    "ComposedEvent",
    "CyclicGaussianEvent",
    "Event",
    "GaussianEvent",
    "PoissonGaussianEvent",
    "RepeatAndSelectEvent",
    "SeenGaussianEvent",
    "event_from_json",
    "repeated",
    "sequential",
    "tally",
]

_DEEPEST = 32
_KINDS: dict[str, type[Event]] = {}


class Event(ABC):
    """One use of the private data by a mechanism.

    Subclasses are frozen dataclasses: equal facts are equal events, so they can be
    counted, cached and compared. Defining one with a ``kind`` makes it readable from
    JSON.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = _KINDS.setdefault(cls.kind, cls)
        # A dataclass decorator may build the class a second time (slots=True); only
        # another class of the same kind would make old ledgers ambiguous.
        if known.__qualname__ != cls.__qualname__:
            raise ConfigurationError(
                f"the event kind {cls.kind!r} is taken by {known.__qualname__}",
                "give the new event a kind of its own",
            )
        _KINDS[cls.kind] = cls

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values, with its ``kind``."""

    @classmethod
    @abstractmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Read back what :meth:`to_json` wrote."""


@dataclass(frozen=True)
class GaussianEvent(Event):
    """Gaussian noise on a sum in which every example takes part.

    Attributes:
        noise_multiplier: noise standard deviation divided by the clip bound C. The
            unit is C under every relation; the accountant knows that replacing an
            example moves the sum by 2C. Zero is allowed and costs infinity.
    """

    noise_multiplier: float
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values."""
        return {"kind": self.kind, "noise_multiplier": self.noise_multiplier}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GaussianEvent:
        """Read back what :meth:`to_json` wrote."""
        return cls(noise_multiplier=_number(data, "noise_multiplier"))


@dataclass(frozen=True)
class PoissonGaussianEvent(Event):
    """Gaussian noise on the sum over a Poisson sample.

    Attributes:
        noise_multiplier: noise standard deviation divided by the clip bound C, as in
            :class:`GaussianEvent`.
        sample_rate: the declared probability q with which each example takes part,
            independently of the others. An empty sample is an event like any other.
    """

    noise_multiplier: float
    sample_rate: float
    kind: ClassVar[str] = "poisson-gaussian"

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_rate(self.sample_rate)

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values."""
        return {
            "kind": self.kind,
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PoissonGaussianEvent:
        """Read back what :meth:`to_json` wrote."""
        return cls(
            noise_multiplier=_number(data, "noise_multiplier"),
            sample_rate=_number(data, "sample_rate"),
        )


@dataclass(frozen=True)
class SeenGaussianEvent(Event):
    """Gaussian noise on a sum that a unit is in by a coin that everybody sees.

    Of a record whose whole client is drawn, say: who was drawn shows, so there is no
    amplification, but no cost either in a round without it.

    Attributes:
        noise_multiplier: as in :class:`GaussianEvent`.
        rate: the declared probability that the unit takes part.
    """

    noise_multiplier: float
    rate: float
    kind: ClassVar[str] = "seen-gaussian"

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_rate(self.rate)

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values."""
        return {
            "kind": self.kind,
            "noise_multiplier": self.noise_multiplier,
            "rate": self.rate,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SeenGaussianEvent:
        """Read back what :meth:`to_json` wrote."""
        return cls(
            noise_multiplier=_number(data, "noise_multiplier"),
            rate=_number(data, "rate"),
        )


@dataclass(frozen=True)
class CyclicGaussianEvent(Event):
    """Correlated Gaussian noise on a Poisson sample of one group out of several.

    An example is in one group, and only its group's events are about it. So events of
    different groups do not add up: the group with the most of them is what counts
    (:func:`sequential`). Each is one Gaussian event for its group because a strategy
    with as many bands as there are groups has columns that do not meet.

    Attributes:
        noise_multiplier: of the noise before it is correlated, as in
            :class:`GaussianEvent`, for a strategy with columns of norm up to 1.
        sample_rate: the declared probability q of each *member of the group*.
        groups: b.
        group: whose turn it was.
        assignment: which drawing of the groups, by a public name of it. When groups are
            drawn anew, an example may change its group, and what was before adds up.
    """

    noise_multiplier: float
    sample_rate: float
    groups: int
    group: int
    assignment: str = ""
    kind: ClassVar[str] = "cyclic-gaussian"

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier)
        check_rate(self.sample_rate)
        check_count(self.groups, "groups", at_least=1)
        check_count(self.group, "group")
        if not isinstance(self.assignment, str):
            raise ConfigurationError(
                f"assignment of the event is {self.assignment!r}, not text"
            )
        if self.group >= self.groups:
            raise ConfigurationError(
                f"group {self.group} of {self.groups}", "groups are counted from 0"
            )

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values."""
        return {
            "kind": self.kind,
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "groups": self.groups,
            "group": self.group,
            "assignment": self.assignment,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CyclicGaussianEvent:
        """Read back what :meth:`to_json` wrote."""
        whole = {name: data.get(name) for name in ("groups", "group", "assignment")}
        return cls(
            noise_multiplier=_number(data, "noise_multiplier"),
            sample_rate=_number(data, "sample_rate"),
            **whole,  # type: ignore[arg-type]  # checked when it is made
        )


@dataclass(frozen=True)
class ComposedEvent(Event):
    """Events that all happened, each chosen with knowledge of those before it.

    Attributes:
        parts: pairs of an event and how often it happened. A count of zero costs
            nothing, and so does an empty composition.
    """

    parts: tuple[tuple[Event, int], ...]
    kind: ClassVar[str] = "composed"

    def __post_init__(self) -> None:
        for event, count in self.parts:
            if not isinstance(event, Event):
                raise ConfigurationError(f"{event!r} is not an event")
            check_repeats(count, "the count of an event")
        _refuse_depth(self)

    def leaves(self) -> Iterator[tuple[Event, int]]:
        """The events that are not compositions, with counts multiplied out."""
        for event, count in self.parts:
            if isinstance(event, ComposedEvent):
                for leaf, times in event.leaves():
                    yield leaf, times * count
            else:
                yield event, count

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values."""
        parts = [{"event": e.to_json(), "count": n} for e, n in self.parts]
        return {"kind": self.kind, "parts": parts}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ComposedEvent:
        """Read back what :meth:`to_json` wrote."""
        parts = data.get("parts")
        if not isinstance(parts, list) or not all(isinstance(p, dict) for p in parts):
            raise ConfigurationError("a composed event needs a list 'parts' of objects")
        return cls(
            tuple((event_from_json(p.get("event")), p.get("count")) for p in parts)
        )


@dataclass(frozen=True)
class RepeatAndSelectEvent(Event):
    """An event a random number of times, of which the best output alone is released.

    See :mod:`curvedp.accounting.selection` for what must hold. RDP alone knows it.

    Attributes:
        event: of one trial.
        mean: expected number of trials, at least 1.
        shape: of the law of their number: infinity is Poisson, 1 geometric, 0
            logarithmic, anything else a truncated negative binomial.
    """

    event: Event
    mean: float
    shape: float
    kind: ClassVar[str] = "repeat-and-select"

    def __post_init__(self) -> None:
        if not isinstance(self.event, Event):
            raise ConfigurationError(f"{self.event!r} is not an event")
        if not (is_number(self.mean) and self.mean >= 1):
            raise ConfigurationError(
                f"the expected number of trials is {self.mean!r}", "give 1 or more"
            )
        if not (self.shape == math.inf or (is_number(self.shape) and self.shape >= 0)):
            raise ConfigurationError(
                f"the shape of the number of trials is {self.shape!r}",
                "give 0 or more; infinity is Poisson",
            )
        _refuse_depth(self)

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values, which have no infinity."""
        shape = "infinity" if self.shape == math.inf else self.shape
        return {
            "kind": self.kind,
            "event": self.event.to_json(),
            "mean": self.mean,
            "shape": shape,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RepeatAndSelectEvent:
        """Read back what :meth:`to_json` wrote."""
        poisson = data.get("shape") == "infinity"
        return cls(
            event=event_from_json(data.get("event")),
            mean=_number(data, "mean"),
            shape=math.inf if poisson else _number(data, "shape"),
        )


def _refuse_depth(event: Event, depth: int = 0) -> None:
    """Refuse events within events within events: what is read may be hostile."""
    if depth > _DEEPEST:
        raise ConfigurationError(
            f"an event is nested more than {_DEEPEST} deep", "compose it in one level"
        )
    inside: list[Event] = []
    if isinstance(event, ComposedEvent):
        inside = [part for part, _ in event.parts]
    elif isinstance(event, RepeatAndSelectEvent):
        inside = [event.event]
    for part in inside:
        _refuse_depth(part, depth + 1)


def event_from_json(data: Any) -> Event:
    """Read any event from its JSON object.

    Raises:
        UnknownEventError: the ``kind`` is not one that this version knows. The event
            cannot be skipped, since its cost would then be missing.
        ConfigurationError: the object is malformed or its values are impossible.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise ConfigurationError(f"not an event, no 'kind' in it: {data!r}")
    cls = _KINDS.get(data["kind"])
    if cls is None:
        raise UnknownEventError(
            f"unknown event kind {data['kind']!r} (known: {', '.join(sorted(_KINDS))})",
            "read it with the version of curvedp, or the extension, that wrote it",
        )
    return cls.from_json(data)


def repeated(event: Event, count: int) -> ComposedEvent:
    """The event ``count`` times in a row."""
    return ComposedEvent(((event, count),))


def tally(events: Iterable[Event]) -> ComposedEvent:
    """Collect equal events into counts, in order of first appearance.

    Composition does not depend on order, and an accountant composes a pair of event
    and count about a hundred times faster than the same events one by one.

    >>> step = PoissonGaussianEvent(1.0, 0.01)
    >>> tally([step, step, repeated(step, 3)]).parts
    ((PoissonGaussianEvent(noise_multiplier=1.0, sample_rate=0.01), 5),)
    """
    counts: dict[Event, int] = {}
    for event in events:
        for leaf, count in repeated(event, 1).leaves():
            counts[leaf] = counts.get(leaf, 0) + count
    return ComposedEvent(tuple(counts.items()))


def sequential(event: Event) -> ComposedEvent:
    """What happened to one example at most: the events that have to be added up.

    Of events whose groups take turns, those of the group with the most of them, each a
    Poisson-sampled Gaussian. Everything else as :func:`tally` counts it.

    >>> turns = [CyclicGaussianEvent(1.0, 0.1, 2, step % 2) for step in range(5)]
    >>> sequential(tally(turns)).parts
    ((PoissonGaussianEvent(noise_multiplier=1.0, sample_rate=0.1), 3),)
    """
    most: dict[tuple[float, float, int, str], int] = {}
    plain: list[tuple[Event, int]] = []
    for leaf, count in tally([event]).parts:
        if isinstance(leaf, CyclicGaussianEvent):
            key = leaf.noise_multiplier, leaf.sample_rate, leaf.groups, leaf.assignment
            most[key] = max(count, most.get(key, 0))
        else:
            plain.append((leaf, count))
    plain += [(PoissonGaussianEvent(*key[:2]), count) for key, count in most.items()]
    return tally([ComposedEvent(tuple(plain))])


def _number(data: Mapping[str, Any], name: str) -> float:
    value = data.get(name)
    if not is_number(value):
        raise ConfigurationError(f"{name} of the event is {value!r}, not a number")
    return float(data[name])
