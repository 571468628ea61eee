"""What a command of ``curvedp diagnose`` found: a document, tables, pictures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from curvedp.cli.diagnose.asked import Asked
from curvedp.cli.output import print_json, results, tell
from curvedp.diagnostics.geometry.canvas import NOT_PRIVATE, mark
from curvedp.experiments.jsonable import jsonable
from curvedp.experiments.studies import StudiedRun, Visited
from curvedp.storage import write_json

__all__ = ["ORACLE", "Findings", "number", "table"]

#: Why the oracle's numbers have no guarantee, for titles.
ORACLE = "the oracle looks at the private data"


@dataclass
class Findings:
    """What a command found: a document, tables, pictures.

    Attributes:
        name: of the diagnosis and of its files.
        asked: the options.
        facts: what is in the document beside the rows.
        not_private: why some of it has no guarantee; empty if all of it has one.
    """

    name: str
    asked: Asked
    facts: dict[str, Any]
    not_private: list[str]

    @classmethod
    def of(
        cls,
        name: str,
        asked: Asked,
        run: StudiedRun,
        visited: Visited,
        needs: Sequence[str] = (),
    ) -> Findings:
        """With the facts of the run, and whatever of it has no guarantee.

        Args:
            name: of the diagnosis.
            asked: the options.
            run: the run.
            visited: where it was looked at.
            needs: what of the private data was looked at without protection.
        """
        reasons = list(needs)
        if not visited.private:
            reasons.append("the parameters were trained without a guarantee")
        facts = {
            "data": run.built.config.data,
            "model": run.model,
            "recipe": run.built.config.configured_recipe().facts(),
            "run": visited.to_json(),
            "sources": {n: s.facts() for n, s in run.sources.items()},
        }
        return cls(name, asked, facts, reasons)

    def draw(self, plot: Callable[[Path], Path], suffix: str = "") -> list[Path]:
        """Draw into the folder; nothing, with a remark, where matplotlib is missing."""
        if importlib.util.find_spec("matplotlib") is None:
            tell("no plot: pip install 'curvedp[plots]'", style="dim")
            return []
        return [plot(self.asked.output / f"{self.name}{suffix}.png")]

    def show(
        self, rows: Any, tables: Sequence[Table | str], drawn: Sequence[Path]
    ) -> None:
        """Write the JSON, and print it or the tables."""
        private = not self.not_private
        document = {
            "kind": "curvedp-diagnosis",
            "diagnosis": self.name,
            "private": private,
            "label": "private" if private else NOT_PRIVATE,
            "not_private_because": self.not_private,
            **self.facts,
            "plots": [path.name for path in drawn],
            **rows,
        }
        file = self.asked.output / f"{self.name}.json"
        write_json(file, jsonable(document))
        if self.asked.json_output:
            print_json(document)
            return
        if not private:
            results.print(escape(mark(self.not_private)), style="bold red")
        for table in tables:
            results.print(table)
        run = self.facts.get("run", {})
        if run.get("epsilon") is not None:
            results.print(
                f"parameters: epsilon {run['epsilon']:.3g} at delta {run['delta']:g}, "
                "spent anew by each diagnosis that trains"
            )
        for path in drawn:
            results.print(f"plot: {escape(str(path))}", soft_wrap=True)
        results.print(f"numbers: {escape(str(file))}", soft_wrap=True)


def number(value: float) -> str:
    """Three digits, for tables."""
    return f"{value:.3g}"


def table(*columns: str, title: str = "") -> Table:
    """A table that fits 80 columns; numbers from the third column on."""
    made = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title=title,
        title_justify="left",
        min_width=len(title),  # or the title is wrapped at the width of the columns
    )
    for place, name in enumerate(columns):
        made.add_column(
            name,
            justify="left" if place < 2 else "right",
            overflow="fold",
            no_wrap=place > 0,
        )
    return made
