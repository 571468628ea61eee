"""What the number of bands does: predicted error, and the best validation score."""

from __future__ import annotations

from arms import TABLES, trials
from correlated import BANDS, EPSILONS, same_run
from images import SIZES
from training import noise

from curvedp.noise.design import Design, error_of
from curvedp.noise.strategies import PrefixSums

PAGE = "correlated"


def section(done, key, seed):
    """Two tables; None while a search is not complete."""
    tables = [name for name, about in TABLES.items() if about.page == PAGE]
    found = {table: _validation(table, done, key, seed) for table in tables}
    if not found or any(rows is None for rows in found.values()):
        return None
    heads = "".join(f" {bands} |" for bands in BANDS)
    lines = [
        "## What the number of bands does", "",
        "Predicted: the squared error of all prefix sums, `sigma(b)^2 tr(W X_b^-1)`, "
        "over that of one band at the same epsilon.", "",
        f"| epsilon |{heads}", "|--:|" + "--:|" * len(BANDS),
    ]  # fmt: skip
    for epsilon in EPSILONS:
        cells = " | ".join(f"{x:.2f}" for x in _predicted(epsilon))
        lines.append(f"| {epsilon:g} | {cells} |")
    lines += [
        "", "Measured: accuracy on the validation split in per cent, the best of all "
        "learning rates, one seed. A spread of one to two points between seeds is "
        "usual here.", "",
        f"| table | arm |{heads}", "|---|---|" + "--:|" * len(BANDS),
    ]  # fmt: skip
    for table, rows in found.items():
        for arm, scores in rows.items():
            cells = " | ".join(f"{100 * scores[b]:.2f}" for b in BANDS)
            lines.append(f"| {table} | {arm} | {cells} |")
    return "\n".join([*lines, ""])


def _predicted(epsilon):
    """Relative squared error for every number of bands, on all examples."""
    table = next(
        t for t in TABLES.values() if t.page == PAGE and t.epsilon == epsilon
    )  # fmt: skip
    workload, errors = PrefixSums(), []
    for bands in BANDS:
        sigma, _, steps = noise(table, SIZES[table.data]["train"], bands)
        design = Design.of("banded", steps, bands, workload)
        errors.append(sigma**2 * error_of(design.strategy(), workload))
    return [error / errors[0] for error in errors]


def _validation(table, done, key, seed):
    """Arm -> bands -> best score; None while a trial is missing."""
    found = {}
    for arm, about in TABLES[table].arms.items():
        if "bands" not in about.searched:
            continue
        for settings in trials(table, arm):
            run, own = same_run(arm, settings)
            job = {"table": table, "arm": run, "phase": "tune", "seed": seed,
                   "settings": own}  # fmt: skip
            if key(job) not in done:
                return None
            scores = found.setdefault(arm, {})
            score = done[key(job)]["accuracy"]
            scores[settings["bands"]] = max(score, scores.get(settings["bands"], 0))
    return found
