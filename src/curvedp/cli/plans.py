"""How a plan is shown by ``--dry-run``."""

from __future__ import annotations

from curvedp.cli.output import print_statement, results, rows_of
from curvedp.experiments import NOT_PRIVATE, Preview

__all__ = ["print_preview"]


def print_preview(preview: Preview) -> None:
    """The plan of a run for people."""
    sampling, plan = preview.sampling, preview.plan
    results.print(
        f"Plan of {preview.recipe} (dry run: nothing is trained)", style="bold"
    )
    pairs = []
    if plan is None:
        pairs.append(("guarantee", NOT_PRIVATE))
    else:
        pairs += [
            ("epsilon", f"{plan.epsilon():.4g} at delta {plan.delta:g}"),
            ("relation", plan.relation.value),
            ("sigma", f"{plan.noise_multiplier:g} ({plan.clipping.name} clipping to "
                      f"{plan.clipping.bound:g})"),
        ]  # fmt: skip
    batches = -(-sampling.expected_batch_size // preview.physical_batch_size)
    pairs += [
        ("steps", str(sampling.steps)),
        ("sample rate", f"{sampling.sample_rate:.6g}"),
        ("batch", f"{sampling.expected_batch_size:g} expected, in {batches:.0f} "
                  f"physical of {preview.physical_batch_size}"),
        ("parameters", f"{preview.parameters:,}".replace(",", " ")),
        ("metrics", "none: there is no test split" if preview.held_out == "none"
                    else f"on the {preview.held_out} split"),
        ("cost", f"about {_duration(preview.seconds)} on {preview.device}"),
    ]  # fmt: skip
    results.print(rows_of(pairs, loud=("guarantee",)))
    if preview.coverage is not None:
        results.print("\nLayers that are covered: name, rule, parameters", style="bold")
        for line in preview.coverage.splitlines():
            results.print(f"  {line}", markup=False, soft_wrap=True)
    if preview.statement is not None:
        results.print()
        print_statement(preview.statement)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
