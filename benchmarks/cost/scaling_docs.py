"""The result of ``scaling.py`` as tables and a plot for the page of figures."""

from __future__ import annotations

import math

from cost.contestants import OURS, PLAIN, WHITENED
from cost.machine import PAGE, ROOT
from cost.reporting import between_marks, threads

__all__ = ["write_scaling_docs"]

_MARKS = {PLAIN: "o", OURS: "s", WHITENED: "^"}


def write_scaling_docs(result):
    """Put tables and plot between the page's marks for this device."""
    device = result["device"]
    image = ROOT / "docs" / "images" / f"scaling_{device}.png"
    _plot(result, image)
    lines = [
        f"![Time of a step against each size](images/{image.name})",
        "",
        *_exponents(result),
        "",
        *_worst(result),
        "",
        *_timed(result),
        f"{result['machine']}, torch {result['torch']}, Python {result['python']}, "
        f"{threads(result)}; medians of {result['repeats']} rounds; "
        f"{result['date']}.",
    ]
    between_marks(PAGE, f"scaling {device}", "\n".join(lines))


def _exponents(result):
    names = (PLAIN, OURS, WHITENED)
    yield (
        "| size | of | values | "
        + " | ".join(f"{n}: fitted, at the end (counted)" for n in names)
        + " |"
    )
    yield "|---|---|---|" + "--:|" * len(names)
    for row in result["rows"]:
        cells = [
            f"{row['exponent'][n]:.2f}, {_last(row, n):.2f} "
            f"({row['counted_exponent'][n]:.2f})"
            for n in names
        ]
        sizes = f"{row['sizes'][0]} to {row['sizes'][-1]}"
        yield f"| {row['sweep']} | {row['of']} | {sizes} | {' | '.join(cells)} |"


def _last(row, name):
    """Slope between the two largest sizes, where calls as such matter least."""
    (n, m), (s, t) = row["sizes"][-2:], row["seconds"][name][-2:]
    return math.log(t / s) / math.log(m / n)


def _worst(result):
    yield (
        "| net, batch | layer whose whitening takes most | T x p > r | norms | map | "
        "over its forward and backward | whitening of the whole net over all passes |"
    )
    yield "|---|---|---|---|---|--:|--:|"
    for row in result["whitening"]:
        worst, total = row["worst"], row["total"]
        shape = "-"
        if worst["shape"] is not None:
            t, p, r = worst["shape"]
            shape = f"{t} x {p} > {r}"
        share = total["whitening_flops"] / total["pass_flops"]
        yield (
            f"| `{row['net']}`, {row['batch']} | `{worst['layer'] or 'positions'}` | "
            f"{shape} | {worst['norms']} | {worst['inputs']} | "
            f"{worst['whitening_over_pass']:.2f} | {share:.3f} |"
        )


def _timed(result):
    if not result["timed"]:
        return
    yield (
        "Timed, layer by layer: whitening over the layer's own pass. A head takes a "
        "fifth of a millisecond in all, most of it the cost of each call."
    )
    yield ""
    for row in result["timed"]:
        cells = [f"`{x['layer']}` {x['ratio']:.2f}" for x in row["layers"]]
        yield f"- `{row['net']}`, batch {row['batch']}: {', '.join(cells)}"
    yield ""


def _plot(result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(2.5 * len(rows), 2.9), layout="constrained")
    for axis, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
        for name, mark in _MARKS.items():
            label = f"{name} ({row['exponent'][name]:.2f})"
            ms = [1e3 * s for s in row["seconds"][name]]
            axis.loglog(row["sizes"], ms, marker=mark, markersize=3, label=label)
        axis.set_title(row["sweep"], fontsize=9)
        axis.legend(fontsize=6, title="exponent", title_fontsize=6)
        axis.set_xticks(row["sizes"], [str(n) for n in row["sizes"]])
        axis.minorticks_off()
        axis.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("ms a step", fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})
