"""DP-SGD beside the non-private reference on real handwritten digits.

Run by ``make demo``; it takes well under a minute on two cores. This is the code of
``curvedp compare``, with its settings written down here. They were chosen on a
validation split of the training data, never on the test split.
"""

import shutil
import sys
from pathlib import Path

from curvedp.cli.compare import comparison_table, remarks, watch_comparison
from curvedp.cli.output import log, print_statement, results, rows_of, tell
from curvedp.errors import CurvedpError
from curvedp.experiments import (
    CompareConfig,
    RunConfig,
    compare,
    is_comparison,
    plot_comparison,
)

FOLDER = Path("demo")
CONFIG = CompareConfig(
    base=RunConfig(
        data="digits",
        model="mlp",
        model_options={"activation": "tanh"},
        privacy={"epsilon": 3.0, "delta": 1e-5, "batch_size": 256, "epochs": 20},
        seed=0,
        device="cpu",
    ),
    recipes=("dp-sgd", "non-private"),
    seeds=3,
    settings={
        "dp-sgd": {"learning_rate": 2.0, "momentum": 0.0},
        "non-private": {"learning_rate": 0.3, "momentum": 0.9},
    },
)


def main() -> int:
    """Train, show the table, draw the plot, print the statement."""
    if is_comparison(FOLDER):
        shutil.rmtree(FOLDER)  # what an earlier demo left
    tell("training on real 8x8 digits, with and without privacy", style="bold")
    try:
        comparison, stopped = watch_comparison(
            lambda report, stop: compare(CONFIG, FOLDER, on_progress=report, stop=stop),
            CONFIG.seeds,
        )
        if comparison is None:
            return 128 + stopped
        plot = plot_comparison(comparison, FOLDER / "plot.png", data="digits")
    except CurvedpError as error:
        log.print(f"error: {error}", markup=False)
        return 2
    results.print()
    results.print(comparison_table(comparison))
    for line in remarks(comparison):
        results.print(line, style="dim")
    private = comparison.runs["dp-sgd"][0]
    results.print("\nWhat one of the private runs promises", style="bold")
    print_statement(private.statement)
    (FOLDER / "statement.txt").write_text(f"{private.statement}\n", encoding="utf-8")
    results.print("\nFiles", style="bold")
    results.print(
        rows_of(
            [
                ("plot", str(plot)),
                ("table", str(FOLDER / "compare.json")),
                ("statement", str(FOLDER / "statement.txt")),
                ("ledger", str(private.run_dir / "ledger.jsonl")),
            ]
        )
    )
    results.print("\nNext", style="bold")
    results.print(f"  .venv/bin/curvedp privacy spent {private.run_dir}")
    results.print(f"  .venv/bin/curvedp evaluate {private.run_dir}")
    results.print("  .venv/bin/curvedp train --data digits --epsilon 1 --dry-run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
