"""The picture of an audit: claims and the bounds that attacks have proved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from curvedp.auditing.result import AuditResult
from curvedp.diagnostics.geometry.canvas import WARNING, Canvas, style_of

__all__ = ["plot_audits"]


def plot_audits(results: Sequence[AuditResult], path: Path) -> Path:
    """A bar to the bound for each audit, a mark at its claim; PNG, PDF or SVG.

    What lies between the two is what the attack could not show. A bar beyond its mark
    is a broken claim, and red.
    """
    claimed, proved = style_of("oracle"), style_of("public")
    canvas = Canvas(1, 1, size=(6.4, 0.35 * len(results) + 1.0))
    panel = canvas.axes[0][0]
    for place, result in enumerate(results):
        panel.barh(
            place,
            result.epsilon_lower,
            height=0.55,
            color=proved.colour if result.holds else WARNING,
            label="proved by the attack" if place == 0 else None,
        )
        panel.plot(
            [result.claim.epsilon] * 2,
            [place - 0.4, place + 0.4],
            color=claimed.colour,
            linewidth=2.2,
            label="claimed" if place == 0 else None,
        )
    panel.set_yticks(range(len(results)), [r.recipe for r in results])
    panel.set_ylim(len(results) - 0.4, -0.6)
    panel.set_xlim(left=0)
    canvas.name(panel, "", "epsilon")
    first = results[0]
    title = (
        f"claim against lower bound, {100 * first.confidence:g} % confidence, "
        f"delta {first.claim.delta:g}"
    )
    return canvas.save(path, title, ())
