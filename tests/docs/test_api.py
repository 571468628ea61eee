"""The API reference says what the docstrings say."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import curvedp
import curvedp.layers
import curvedp.probes
import curvedp.whitening

SCRIPT = Path(__file__).parents[2] / "docs" / "build_api.py"


def script():
    spec = importlib.util.spec_from_file_location("build_api", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    build_api = script()
    written = build_api.PAGE.read_text(encoding="utf-8")
    assert written == build_api.build(), "run: python docs/build_api.py"


def test_every_public_name_is_on_the_page():
    build_api = script()
    page = build_api.PAGE.read_text(encoding="utf-8")
    modules = [importlib.import_module(name) for _, name, _ in build_api.SECTIONS]
    assert {curvedp.probes, curvedp.whitening, curvedp.layers} <= set(modules)
    for module in modules:
        missing = [n for n in module.__all__ if f"### `{n}`\n" not in page]
        assert not missing, f"{module.__name__}: {missing}"


def test_nothing_on_the_page_depends_on_the_machine():
    page = script().PAGE.read_text(encoding="utf-8")
    assert "0x" not in page
    assert str(Path.home()) + "/" not in page
    assert str(SCRIPT.parents[1]) not in page


def test_a_docstring_becomes_markdown():
    def example(first, *, second=1):
        """Does :func:`this` with ``that``.

        Args:
            first: one thing,
                on two lines.
            second: another.
        """

    text = script()._function("example", example)
    assert "Does `this` with `that`." in text
    assert "- `first`: one thing,\n  on two lines.\n- `second`: another." in text
    assert "    *,\n    second=1,\n" in text
