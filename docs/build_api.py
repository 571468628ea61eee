"""Write ``docs/api.md`` from the docstrings.

    python docs/build_api.py            # writes the page
    python docs/build_api.py --check    # exits with 1 if it is out of date

The page holds what the packages below list in ``__all__``, in the order of this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "api.md"

#: Heading, module, remark. A name is described once, where it comes first.
SECTIONS = (
    ("curvedp", "curvedp", "What most programs need."),
    ("curvedp.train", "curvedp.train", "Losses, metrics, logs and results of a run."),
    ("curvedp.plan", "curvedp.plan", "Everything the guarantee depends on."),
    ("curvedp.recipes", "curvedp.recipes", "Methods by name."),
    (
        "curvedp.noise.strategies",
        "curvedp.noise.strategies",
        "How the noise of different steps is correlated.",
    ),
    ("curvedp.update", "curvedp.update", "What is done with a release."),
    ("curvedp.probes", "curvedp.probes", "Inputs and labels that curvature is from."),
    ("curvedp.whitening", "curvedp.whitening", "Maps that reshape gradients."),
    ("curvedp.layers", "curvedp.layers", "Per-example gradients of a model."),
    ("curvedp.clipping", "curvedp.clipping", "Rules that bound an example's part."),
    ("curvedp.accounting", "curvedp.accounting", "Events, accountants, ledgers."),
    ("curvedp.federated", "curvedp.federated", "Clients, server, who sees what."),
    ("curvedp.auditing", "curvedp.auditing", "Attacks, and what they prove."),
    ("curvedp.data", "curvedp.data", "Data sets that are declared, never measured."),
    ("curvedp.models", "curvedp.models", "Built-in models."),
    ("curvedp.errors", "curvedp.errors", "Every exception, each with advice."),
)

INTRODUCTION = """\
# API reference

Built from the docstrings by `docs/build_api.py`; a test checks that it is up to date. \
For a first look, [quick start](quick_start.md) is better.
"""

_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):`~?([^`]+)`")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Guarantees|Note):$")
_ITEM = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)$")
_ADDRESS = re.compile(
    r"<([\w.]+) object at 0x[0-9a-f]+>"
    r"|<(?:function|class) '?([\w.]+)'?(?: at 0x[0-9a-f]+)?>"
)


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="write docs/api.md")
    parser.add_argument("--check", action="store_true")
    text = build()
    if parser.parse_args().check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not current:
            sys.stderr.write("docs/api.md is out of date: python docs/build_api.py\n")
        return int(not current)
    PAGE.write_text(text, encoding="utf-8")
    return 0


def build() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    seen: set[int] = set()
    for heading, module_name, remark in SECTIONS:
        module = importlib.import_module(module_name)
        entries = list(_entries(module, seen))
        if entries:
            parts += [f"## {heading}\n\n{remark}\n", *entries]
    return "\n".join(parts)


def _entries(module: Any, seen: set[int]) -> Iterator[str]:
    for name in sorted(module.__all__, key=str.lower):
        thing = getattr(module, name)
        described = inspect.isclass(thing) or inspect.isroutine(thing)
        if not described:
            yield f"### `{name}`\n\n{_constant(thing)}\n"
        elif id(thing) not in seen:
            seen.add(id(thing))
            yield (
                _class(name, thing)
                if inspect.isclass(thing)
                else _function(name, thing)
            )


def _constant(thing: Any) -> str:
    if isinstance(thing, dict):
        return "By name: " + ", ".join(f"`{key}`" for key in thing) + "."
    if hasattr(thing, "__origin__") or hasattr(thing, "__args__"):
        return "A type."
    kind = type(thing).__name__
    return f"A constant, `{kind}`."


def _function(name: str, thing: Any, level: str = "###") -> str:
    return f"{level} `{name}`\n\n{_signature(name, thing)}{_prose(thing)}\n"


def _class(name: str, thing: type) -> str:
    lines = [f"### `{name}`\n"]
    if issubclass(thing, enum.Enum):
        values = ", ".join(f"`{item.value}`" for item in thing)
        lines.append(f"{_prose(thing)}\n\nValues: {values}.\n")
    elif issubclass(thing, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
        lines.append(f"Derives from {bases}.\n\n{_prose(thing)}\n")
    else:
        lines.append(f"{_signature(name, thing)}{_prose(thing)}\n")
        members = [_member(*pair) for pair in _members(thing)]
        lines += [*members, ""] if members else []
    return "\n".join(lines)


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    fields = {f.name for f in dataclasses.fields(thing)} if _is_data(thing) else set()
    for name, member in vars(thing).items():
        if name.startswith("_") or name in fields:
            continue
        inner = getattr(member, "__func__", member)
        if isinstance(member, property) or inspect.isfunction(inner):
            yield name, member


def _is_data(thing: type) -> bool:
    return dataclasses.is_dataclass(thing)


def _member(name: str, member: Any) -> str:
    """A line each: the first sentence of a method or property."""
    inner = getattr(member, "__func__", member)
    text = (inspect.getdoc(inner) or "").split("\n\n")[0]
    shown = name if isinstance(member, property) else f"{name}{_arguments(inner)}"
    told = _inline(" ".join(text.split()))
    return f"- `{shown}`" + (f": {told}" if told else "")


def _arguments(thing: Any) -> str:
    parameters = [p for p in inspect.signature(thing).parameters if p not in _IMPLICIT]
    return f"({', '.join(parameters)})"


_IMPLICIT = ("self", "cls")


def _signature(name: str, thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    lines: list[str] = []
    for key, parameter in signature.parameters.items():
        if key in _IMPLICIT:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        lines.append(f"    {_parameter(parameter)},")
    if not lines:
        return f"```text\n{name}()\n```\n\n"
    return "```text\n" + "\n".join([f"{name}(", *lines, ")"]) + "\n```\n\n"


def _parameter(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if isinstance(annotation, str):  # annotations are not evaluated: drop the quotes
        shown = str(parameter.replace(annotation=inspect.Parameter.empty))
        name, equals, default = shown.partition("=")
        shown = f"{name}: {annotation}" + (f" = {default}" if equals else "")
    else:
        shown = str(parameter)
    return _ADDRESS.sub(_named, shown)


def _named(match: re.Match[str]) -> str:
    return (match.group(1) or match.group(2)).rpartition(".")[2]


def _prose(thing: Any) -> str:
    """A docstring in Markdown: roles become code, argument lists become bullets."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    out: list[str] = []
    inside = bulleted = False
    for line in lines:
        heading = _SECTION.match(line)
        if heading:
            inside, bulleted = True, False
            out += [f"**{heading.group(1)}**", ""]
            continue
        if inside and line and not line.startswith(" "):
            inside = False
        if not inside:
            out.append(_inline(line))
            continue
        item = _ITEM.match(line)
        if item:
            out.append(f"- `{item.group(1)}`: {_inline(item.group(2))}")
            bulleted = True
        else:
            out.append(_inline(("  " if bulleted else "") + line.strip()).rstrip())
    return _tables("\n".join(out)).strip()


def _inline(text: str) -> str:
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def _tables(text: str) -> str:
    """Simple tables of reStructuredText stay as they are, in a block."""
    return re.sub(
        r"(?m)^(=+ +=+[^\n]*\n(?:.*\n)*?)(?=\n|\Z)", r"```text\n\1```\n", text + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
