"""What all plots of the geometry share: colours, titles, grids, files.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart;
every line has a dash pattern and a marker of its own as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvedp.errors import missing_extra
from curvedp.storage import write_atomically

__all__ = ["NOT_PRIVATE", "Canvas", "Style", "some_layers", "style_of"]

#: How results that the private data has shaped are marked wherever they appear.
NOT_PRIVATE = "not private"

INK, WARNING, GRID = "#1f2933", "#b42318", "#dfe3e8"


@dataclass(frozen=True)
class Style:
    """How a line is drawn."""

    colour: str
    dash: Any
    marker: str

    def line(self) -> dict[str, Any]:
        """Keywords of ``plot``."""
        return {"color": self.colour, "linestyle": self.dash, "linewidth": 1.8}

    def dots(self) -> dict[str, Any]:
        """Keywords of ``plot`` with markers."""
        return {**self.line(), "marker": self.marker, "markersize": 5}


_STYLES = {
    "oracle": Style("#000000", (0, (4, 2)), "o"),
    "public": Style("#0072B2", "-", "s"),
    "synthetic": Style("#E69F00", "-", "^"),
    "white": Style("#56B4E9", (0, (1, 1)), "v"),
    "identity": Style("#999999", (0, (5, 1, 1, 1)), "D"),
}
_MORE = (
    Style("#009E73", "-", "^"),
    Style("#0072B2", (0, (4, 2)), "s"),
    Style("#CC79A7", (0, (1, 1)), "v"),
    Style("#D55E00", (0, (5, 1, 1, 1)), "X"),
)


def style_of(name: str, place: int = 0) -> Style:
    """Of a source by its name, of anything else by its place."""
    return _STYLES.get(name, _MORE[place % len(_MORE)])


class Canvas:
    """A grid of axes with one title and one legend above all of them.

    Args:
        rows: of the grid.
        columns: of the grid.
        size: width and height of one panel in inches.
    """

    def __init__(
        self, rows: int, columns: int, size: tuple[float, float] = (3.3, 2.5)
    ) -> None:
        try:
            import matplotlib
        except ImportError:
            raise missing_extra("matplotlib", "plots") from None
        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        width = max(6.4, size[0] * columns)
        self._figure = Figure(
            figsize=(width, size[1] * rows + 1.1), layout="constrained"
        )
        self.axes = self._figure.subplots(rows, columns, squeeze=False)
        for panel in self.axes.flat:
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
            panel.grid(True, color=GRID, linewidth=0.7)
            panel.set_axisbelow(True)
            panel.tick_params(labelsize=8, colors=INK)

    def name(self, panel: Any, title: str, x: str = "", y: str = "") -> None:
        """Title and axis labels of a panel."""
        panel.set_title(title, fontsize=9, color=INK)
        panel.set_xlabel(x, fontsize=8.5, color=INK)
        panel.set_ylabel(y, fontsize=8.5, color=INK)

    def save(self, path: Path, title: str, not_private: Sequence[str]) -> Path:
        """Write the picture with its title and the mark that it needs.

        Args:
            path: PNG, PDF or SVG by its suffix.
            title: first line.
            not_private: why what is drawn has no guarantee; empty if it has one.
        """
        for panel in self.axes.flat:
            _readable_ticks(panel)
        handles, labels = _legend(self.axes)
        # the title is one block above the panels, the legend another below them
        words = f"{title}\n{mark(not_private)}" if not_private else title
        colour = WARNING if not_private else INK
        self._figure.suptitle(words, fontsize=10, color=colour)
        if handles:
            self._figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=min(len(labels), 6),
                frameon=False,
                fontsize=9,
            )
        suffix = path.suffix.lstrip(".") or "png"
        write_atomically(
            path, lambda p: self._figure.savefig(p, dpi=150, format=suffix)
        )
        return path


def mark(not_private: Sequence[str]) -> str:
    """The line that says what has no guarantee."""
    return f"{NOT_PRIVATE.upper()}: {', '.join(not_private)}"


def _readable_ticks(panel: Any) -> None:
    """Plain numbers where a logarithmic axis spans little, powers of ten elsewhere."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if panel.get_yscale() != "log":
        return
    bottom, top = panel.get_ylim()
    if bottom > 0 and top / bottom < 40:
        few = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
        wide = LogLocator(subs=(1, 2, 5), numticks=8)
        panel.yaxis.set_major_locator(few if top / bottom < 4 else wide)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def some_layers(names: Sequence[str], most: int = 5) -> list[str]:
    """At most so many, evenly from the first to the last."""
    unique = list(dict.fromkeys(names))
    if len(unique) <= most:
        return unique
    places = [round(i * (len(unique) - 1) / (most - 1)) for i in range(most)]
    return [unique[place] for place in places]
