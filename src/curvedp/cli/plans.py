"""How plans are shown by ``--dry-run`` and ``--explain-plan``."""

from __future__ import annotations

from curvedp.cli.output import print_statement, results, rows_of
from curvedp.experiments import NOT_PRIVATE, Preview
from curvedp.recipes import Curvature
from curvedp.train import StepPlan

__all__ = ["curvature_rows", "print_preview", "print_step_plan"]


def print_preview(preview: Preview) -> None:
    """The plan of a run for people."""
    sampling, plan = preview.sampling, preview.plan
    results.print(
        f"Plan of {preview.recipe} (dry run: nothing is trained)", style="bold"
    )
    pairs = []
    if plan is None or preview.oracle:
        pairs.append(("guarantee", NOT_PRIVATE))
    if plan is not None and not preview.oracle:
        pairs += [
            ("epsilon", f"{plan.epsilon():.4g} at delta {plan.delta:g}"),
            ("relation", plan.relation.value),
        ]
    if plan is not None:
        pairs.append(
            ("sigma", f"{plan.noise_multiplier:g} ({plan.clipping.name} clipping to "
                      f"{plan.clipping.bound:g})")
        )  # fmt: skip
    if plan is not None and plan.correlation is not None:
        noise = plan.correlation
        pairs.append(
            ("noise", f"correlated, {noise.design.kind} with {noise.bands} bands; "
                      f"{noise.bands} groups in turns, {plan.rounds} draws of each at "
                      f"rate {plan.event_rate:.6g}")
        )  # fmt: skip
    if preview.curvature is not None:
        pairs += curvature_rows(preview.curvature)
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


def print_step_plan(plan: StepPlan) -> None:
    """What a step does with each layer, for people."""
    results.print("Plan of a step (nothing is trained)", style="bold")
    results.print(str(plan), markup=False, soft_wrap=True)


def curvature_rows(curvature: Curvature) -> list[tuple[str, str]]:
    """Probe, whitening and refresh of a recipe, for people."""
    c = curvature
    inputs = {
        "synthetic": f"synthetic inputs, spectral power {c.spectral_power:g} if images",
        "public": "examples declared public",
        "releases": "none: releases, with the noise taken out",
        "private": f"none: the private data, measured with noise for "
        f"{c.curvature_share:g} of the squared clip bound",
        "oracle": "THE PRIVATE DATA ITSELF (oracle, for research)",
    }[c.probe]
    labels = {"model": "the model's", "uniform": "uniform", "own": "their own"}
    if c.moments == "subspace":
        rest = f"a residual of share {c.residual_share:g}, clipped to "
        rest += f"{c.residual_clip:g} of the embedding's norm"
        how = f"subspace of {c.basis} in each layer, "
        how += rest if c.residual_share else "no residual"
    elif c.clamp == "off":
        rank = f"{c.rank} eigenpairs" if c.rank else "all eigenpairs"
        kind = "absolute" if c.absolute_damping else "relative"
        squares = c.moments != "kronecker"
        what = "diagonal" if c.diagonal else f"side {c.side}"
        how = f"{c.moments if squares else what}, exponent {c.exponent:g}, "
        how += "" if c.diagonal or squares else f"{rank}, "
        how += f"{kind} damping {c.damping:g}"
    else:
        floor = "no floor" if c.clamp == "none" else f"floor {c.clamp}"
        how = f"products of eigenvalues, {floor}"
    order = "" if c.clip_order == "in" else f", clipped {c.clip_order} the map"
    estimates = f"{c.probe_batches} x {c.probe_size} probes, {c.sharing}"
    if c.probe == "private":
        estimates = "the releases since the last one"
        estimates += f" (weight of the past {c.decay:g})" if c.decay else ""
    if c.probe == "releases":
        estimates = f"an average of releases (weight of the past {c.decay:g})"
    when = f"every {c.refresh} steps" if c.refresh else "once, before the first step"
    return [
        (
            "probe",
            inputs if c.from_releases else f"{inputs}; labels {labels[c.labels]}",
        ),
        ("whitening", f"{how}; back-map {c.back_map}{order}"),
        ("refresh", f"{when}, from {estimates}"),
    ]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
