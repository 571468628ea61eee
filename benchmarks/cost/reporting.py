"""The result as tables for a page of the documentation."""

from __future__ import annotations

import statistics

from cost.contestants import OUR_WAYS, OURS, OUT_OF_MEMORY, PLAIN, WHITENED
from cost.measuring import REFRESH_EVERY, ratios

__all__ = [
    "between_marks",
    "table",
    "threads",
    "write_docs",
    "write_epochs_docs",
    "write_largest_docs",
]


def table(result):
    lines = [*_steps(result), "", *_beside_opacus(result), "", *_whitened(result)]
    guards = list(_guard(result))
    lines += ["", *guards] if guards else []
    reasons = [
        f"- `{row['net']}`, {name}: {reason}"
        for row in result["rows"]
        for name, reason in row["refused"].items()
        if reason != OUT_OF_MEMORY
    ]
    if reasons:
        lines += ["", "Who does not take a net says:", "", *reasons]
    where = "GPU" if result["device"] != "cpu" else threads(result)
    precisions = ", ".join(sorted({row["precision"] for row in result["rows"]}))
    opacus = result["opacus"] or "absent"
    lines += [
        "",
        f"{result['machine']}, {where}, {precisions}; torch {result['torch']}, Opacus "
        f"{opacus}, Python {result['python']}; medians of {result['repeats']} "
        f"rounds; {_dates(result)}.",
    ]
    return "\n".join(lines)


def _dates(result):
    """Of the rows; those that do not say it are as old as the file."""
    found = {row.get("date", result["date"]) for row in result["rows"]}
    return " and ".join(sorted(found))


def _guard(result):
    """What looks over the model in a pass; older results do not say it."""
    rows = [row for row in result["rows"] if row.get("guard_seconds") is not None]
    if rows:
        yield "| net, batch | guard, ms a pass | of our plain step |"
        yield "|---|--:|--:|"
    for row in rows:
        seconds = row["guard_seconds"]
        share = seconds / row["median_seconds"][OURS]
        yield f"| {_label(row)} | {1e3 * seconds:.2f} | {share:.1%} |"


def _estimates(row, name):
    """Seconds of a step that are its share of the estimates of curvature."""
    return row["refresh_seconds"] / REFRESH_EVERY if WHITENED in name else 0.0


def _with_estimates(row, name):
    """A step with its share of them, over one that is due none."""
    return 1 + _estimates(row, name) / row["median_seconds"][name]


def _steps(result):
    yield (
        "| net, batch | contestant | step, ms | of it estimates of curvature, ms | "
        "over non-private | peak memory, MiB |"
    )
    yield "|---|---|--:|--:|--:|--:|"
    for row in result["rows"]:
        for name in row["contestants"]:
            if name in row["refused"]:
                full = row["refused"][name] == OUT_OF_MEMORY
                why = OUT_OF_MEMORY if full else "does not take it"
                yield f"| {_label(row)} | {name} | {why} | | | |"
                continue
            more = 1e3 * _estimates(row, name)
            ms = 1e3 * row["median_seconds"][name] + more
            over, of_it = "", f"{more:.1f}" if more else ""
            if PLAIN in row["seconds"]:
                plain = ratios(row["seconds"], name, PLAIN)[1]
                over = f"{plain * _with_estimates(row, name):.2f}"
            peak = row["median_peak_mib"][name]
            yield (
                f"| {_label(row)} | {name} | {ms:.1f} | {of_it} | {over} | {peak:.0f} |"
            )


def _beside_opacus(result):
    yield (
        "| net | ours | fastest mode of Opacus | our time over its (quartiles) | our "
        "memory over its | leanest mode of Opacus | our memory over its |"
    )
    yield "|---|---|---|--:|--:|---|--:|"
    for row in result["rows"]:
        for ours in OUR_WAYS:
            if "fastest_mode" not in row or ours not in row:
                continue
            own, leanest = row[ours], _mode(row["leanest_mode"])
            times = [q * _with_estimates(row, ours) for q in own["time_quartiles"]]
            yield (
                f"| {_label(row)} | {ours} | {_mode(row['fastest_mode'])} | "
                f"{_quartiles(times)} | "
                f"{own['memory_over_fastest_mode']:.2f} | "
                f"{leanest} | {own['memory_over_leanest_mode']:.2f} |"
            )


def _whitened(result):
    yield (
        f"| net | {WHITENED} over {OURS}, time with an estimate of curvature every "
        f"{REFRESH_EVERY} steps | without (quartiles) | memory | an estimate, s | its "
        "peak memory, MiB |"
    )
    yield "|---|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        for kind in ("", " graph"):
            if f"whitened_over_ours{kind}" not in row:
                continue
            own = row[f"whitened_over_ours{kind}"]
            yield (
                f"| {_label(row)}{kind and ', both as graphs'} | "
                f"{own['time_with_refresh']:.2f} | "
                f"{_quartiles(own['time_quartiles'])} | "
                f"{own['memory']:.2f} | {row['refresh_seconds']:.2f} | "
                f"{row['refresh_peak_mib']:.0f} |"
            )


def _label(row):
    precision = "" if row["precision"] == "float32" else f", {row['precision']}"
    return f"`{row['net']}`, {row['batch']}{precision}"


def _quartiles(values):
    low, middle, high = values
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _mode(contestant):
    return contestant.removeprefix("opacus ")


def write_docs(result, page):
    """Put the tables between the page's marks for this device."""
    between_marks(page, f"step_cost {result['device']}", table(result))


def write_largest_docs(result, page):
    """The largest batches, a row for each net."""
    groups = {}
    for row in result["rows"]:
        key = (row["net"], row["limit_mib"], row["precision"])
        groups.setdefault(key, {})[row["contestant"]] = row
    lines = [
        "| net | memory, GiB | contestant | largest batch | over Opacus's largest |",
        "|---|--:|---|--:|--:|",
    ]
    for (net, limit, precision), rows in groups.items():
        found = {n: row["rows"] for n, row in rows.items() if "rows" in row}
        best = max((v for n, v in found.items() if n.startswith("opacus")), default=0)
        shown = net if precision == "float32" else f"{net}, {precision}"
        for name in rows:
            size = found.get(name, "does not take it")
            over = f"{found[name] / best:.2f}" if best and name in found else ""
            lines.append(f"| `{shown}` | {limit / 1024:g} | {name} | {size} | {over} |")
    lines += ["", _machine(result)]
    between_marks(page, f"largest {result['device']}", "\n".join(lines))


def write_epochs_docs(result, page):
    """The time of some epochs."""
    (row,) = result["rows"]
    lines = [
        "| contestant | attach, s | step, ms | estimate of curvature, s | "
        f"{row['epochs']} epochs, s | over opacus hooks | over opacus ghost |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, whole in row["epochs_seconds"].items():
        over = [f"{v:.2f}" for v in row["over_opacus"].get(name, {}).values()]
        step = 1e3 * statistics.median(row["step_seconds"][name])
        estimate = row["refresh_seconds"].get(name)
        shown = "" if estimate is None else f"{estimate:.2f}"
        lines.append(
            f"| {name} | {row['attach_seconds'][name]:.2f} | {step:.1f} | {shown} | "
            f"{whole:.0f} | {' | '.join(over or ['', ''])} |"
        )
    lines += ["", _machine(result)]
    between_marks(page, f"epochs {result['device']}", "\n".join(lines))


def threads(result):
    """How many, and how time was taken."""
    own = ", its own CPU time" if result.get("clock") == "process" else ""
    return f"{result['threads']} thread(s){own}"


def _machine(result):
    return (
        f"{result['machine']}, {threads(result)}; torch {result['torch']}, "
        f"Opacus {result['opacus']}, Python {result['python']}; {result['date']}."
    )


def between_marks(page, name, text):
    """Put a text in the place of what stands between two marks of a page."""
    whole = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in whole or end not in whole:
        raise SystemExit(f"{page} has no marks {begin} and {end}")
    head, _, rest = whole.partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", encoding="utf-8")
