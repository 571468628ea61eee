"""Transforms one after the other, with their settings and their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import Any

from curvedp.errors import ConfigurationError
from curvedp.update.transform import Gradient, LookAhead, Transform, Values

__all__ = ["Chain"]

#: Fields of these types are settings.
_SETTING_TYPES = ("int", "float", "str", "bool")


@dataclass(frozen=True)
class Chain(Transform):
    """Transforms one after the other; without any, the identity.

    Raises:
        ConfigurationError: a transform needs to know the noise, and one before it does
            not say what becomes of it; or two of them look ahead.
    """

    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        known_so_far = True
        for transform in self.transforms:
            if transform.reads_noise and not known_so_far:
                raise ConfigurationError(
                    f"{_name(transform)} corrects for the noise in its input, and a "
                    "transform before it does not say how much that is",
                    f"put {_name(transform)} before it, or give that transform "
                    "tracks_noise and the variance of its output",
                )
            known_so_far = known_so_far and transform.tracks_noise
        ahead = [t for t in self.transforms if t.looks_ahead]
        if len(ahead) > 1:
            raise ConfigurationError(
                f"{' and '.join(map(_name, ahead))} both say where gradients are to "
                "be taken",
                "use one of them",
            )

    # -- as a transform ---------------------------------------------------------------

    def init(self, parameters: Values, *, look_ahead: bool = False) -> list[Any]:
        """States before the first step.

        Args:
            parameters: as they are before the first step.
            look_ahead: whether the caller takes gradients where :meth:`look_ahead`
                says. A chain that looks ahead is refused otherwise: without that it
                would be another method under the same name.
        """
        if self.looks_ahead and not look_ahead:
            raise ConfigurationError(
                "a transform looks ahead, and gradients are taken at the parameters",
                "choose a recipe without it (dp-sgd with momentum is the nearest)",
            )
        return [
            t.init(parameters, look_ahead=look_ahead)
            if isinstance(t, Chain)
            else t.init(parameters)
            for t in self.transforms
        ]

    def update(
        self, gradient: Gradient, state: list[Any]
    ) -> tuple[Gradient, list[Any]]:
        following = []
        for transform, s in zip(self.transforms, state, strict=True):
            gradient, s = transform.update(gradient, s)
            following.append(s)
        return gradient, following

    @property
    def reads_noise(self) -> bool:
        return any(t.reads_noise for t in self.transforms)

    @property
    def tracks_noise(self) -> bool:
        return all(t.tracks_noise for t in self.transforms)

    @property
    def looks_ahead(self) -> bool:
        return any(t.looks_ahead for t in self.transforms)

    def look_ahead(self, state: list[Any]) -> LookAhead | None:
        for transform, s in zip(self.transforms, state, strict=True):
            if transform.looks_ahead:
                return transform.look_ahead(s)
        return None

    @property
    def follows_steps(self) -> bool:
        """Whether a transform wants to be told how the parameters moved."""
        return any(
            t.follows_steps
            if isinstance(t, Chain)
            else type(t).stepped is not Transform.stepped
            for t in self.transforms
        )

    def stepped(self, before: Values, after: Values, state: list[Any]) -> list[Any]:
        return [
            transform.stepped(before, after, s)
            for transform, s in zip(self.transforms, state, strict=True)
        ]

    def averaged(self, state: list[Any]) -> Values | None:
        """The last transform's that keeps an average; None without one."""
        found: Values | None = None
        for transform, s in zip(self.transforms, state, strict=True):
            average = transform.averaged(s)
            found = found if average is None else average
        return found

    # -- settings ---------------------------------------------------------------------

    def setting_types(self) -> dict[str, str]:
        """What a user may set: "int", "float", "str" or "bool" by name."""
        return {name: _type(field) for name, _, field in self._settings()}

    def facts(self) -> dict[str, Any]:
        """All settings as JSON values."""
        return {
            name: getattr(self.transforms[i], field.name)
            for name, i, field in self._settings()
        }

    def configured(self, given: Mapping[str, Any]) -> Chain:
        """The same transforms with other settings."""
        changed = list(self.transforms)
        for name, i, field in self._settings():
            if name in given:
                changed[i] = _with(changed[i], field.name, given[name])
        return Chain(tuple(changed))

    def _settings(self) -> Iterator[tuple[str, int, Field[Any]]]:
        """Name, transform and field; a name's second use is ``name_2``."""
        uses: dict[str, int] = {}
        for i, transform in enumerate(self.transforms):
            own: Any = transform
            for field in fields(own) if is_dataclass(own) else ():
                if field.init and _type(field) in _SETTING_TYPES:
                    count = uses[field.name] = uses.get(field.name, 0) + 1
                    suffix = "" if count == 1 else f"_{count}"
                    yield field.name + suffix, i, field


def _with(transform: Any, name: str, value: Any) -> Transform:
    changed: Transform = replace(transform, **{name: value})
    return changed


def _type(field: Any) -> str:
    """An annotation's name, whether the module postpones annotations or not."""
    if isinstance(field.type, str):
        return field.type
    return str(getattr(field.type, "__name__", ""))


def _name(transform: Transform) -> str:
    return type(transform).__name__
