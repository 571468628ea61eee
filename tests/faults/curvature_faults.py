"""Faults in how curvature reaches a run: rules 9, 11 and 12."""

from __future__ import annotations

from curvedp.accounting import LedgerRecord
from curvedp.clipping import CurvatureClipping, bounded
from curvedp.clipping import measured as clipping_measured
from curvedp.curvature import Refresh
from curvedp.experiments import RunConfig
from curvedp.train import attach, probing, statement
from curvedp.train.engine import Engine
from curvedp.train.private import Private
from curvedp.train.whitened import CurvatureSource
from curvedp.whitening import DiagonalMap

from . import curvature_checks as checks
from .mutate import Fault, Patch

_AT = "self._clip_map(step)"


def _made_anew(change):
    """The whitener of a step, made again with something of the batch in it."""
    return f"(vars(self.whiteners).update(_made_at=None, {change}), {_AT})[1]"


FAULTS = [
    Fault(
        "9 oracle without a label",
        checks.oracle_has_no_guarantee,
        (
            Patch(attach.make_private, "not whiteners.provenance.is_public", "False"),
            Patch(
                Private._oracle,
                "not self._engine.whiteners.provenance.is_public",
                "False",
            ),
        ),
    ),
    Fault(
        "9 oracle that is not asked for",
        checks.unsaid_oracle_is_refused,
        (Patch(probing.choose_probe, "not given.provenance.is_public", "False"),),
    ),
    Fault(
        "9 oracle of an earlier sitting",
        checks.oracle_is_not_forgotten,
        (
            Patch(Private._oracle, "now or self._engine.ledger.is_oracle", "now"),
            Patch(statement.make_statement, "oracle or ledger.is_oracle", "oracle"),
            Patch(LedgerRecord.epsilon, "if self.is_oracle:", "if False:"),
        ),
    ),
    Fault(
        "9 oracle in a run folder",
        checks.oracle_run_is_labelled,
        (Patch(RunConfig.private, "not recipe.oracle", "True"),),
    ),
    Fault(
        "11 whitener from the batch",
        checks.whitener_ignores_what_is_in_the_batch,
        (
            Patch(
                Engine.clip,
                _AT,
                _made_anew(
                    "_streams=RandomStreams(int(1e6 * float(ios[0].sq_norms().sum())))"
                ),
            ),
        ),
    ),
    Fault(
        "11 whitener from the batch's size",
        checks.whitener_ignores_the_size_of_the_batch,
        (
            Patch(
                Engine.clip,
                _AT,
                _made_anew(
                    "_how=__import__('dataclasses').replace("
                    "self.whiteners._how, size=int(present.sum()))"
                ),
            ),
        ),
    ),
    Fault(
        "11 probes from the noise's stream",
        checks.whitener_follows_the_public_seed_alone,
        (Patch(CurvatureSource._generator, "Stream.PROBE", "Stream.NOISE"),),
    ),
    Fault(
        "11 whitener at undeclared steps",
        checks.whitener_changes_at_declared_steps_only,
        (Patch(Refresh.last_due, "step - step % self.every", "step"),),
    ),
    Fault(
        "11 whitener of other parameters after resuming",
        checks.whitener_is_made_of_released_parameters,
        (
            Patch(
                CurvatureSource.load,
                'self._make(placed["step"], placed["parameters"])',
                'self._make(placed["step"], self._parameters())',
            ),
        ),
    ),
    Fault(
        "12 every part of a gradient has the whole bound",
        checks.parts_share_one_bound,
        (Patch(bounded.clipped_sum, "rule.of_part(own.share)", "rule"),),
    ),
    Fault(
        "12 the residual is scaled and not clipped to its share",
        checks.parts_share_one_bound,
        (
            Patch(
                bounded.clipped_sum,
                "zip(parts, sq_norms, strict=True)",
                "zip(parts, sq_norms[:1].expand_as(sq_norms), strict=True)",
            ),
        ),
    ),
    Fault(
        "12 norms of a diagonal map from float32 gradients",
        checks.what_cancels_in_float32_counts,
        (Patch(DiagonalMap._sq_norms, "exactly.per_example()", "io.per_example()"),),
    ),
    Fault(
        "12 a measured factor that is not cut",
        checks.gradient_and_factors_share_one_bound,
        (
            Patch(
                CurvatureClipping._factor,
                "torch.maximum(limit, squares * (1 + rounding))",
                "limit",
            ),
        ),
    ),
    Fault(
        "12 a measured share that the gradient keeps too",
        checks.gradient_and_factors_share_one_bound,
        (Patch(CurvatureClipping._of_gradient, "math.sqrt(1.0 - self.share)", "1.0"),),
    ),
    Fault(
        "12 a measured share for each factor",
        checks.gradient_and_factors_share_one_bound,
        (Patch(CurvatureClipping.length, "self.share / factors", "self.share"),),
    ),
    Fault(
        "11 padding in a measured factor",
        checks.unseen_padding_is_in_no_factor,
        (
            Patch(
                clipping_measured._rows,
                "torch.where(counts, a, torch.zeros_like(a))",
                "a",
            ),
        ),
    ),
    Fault(
        "9 curvature that is measured and not declared",
        checks.measured_curvature_is_declared,
        (
            Patch(
                CurvatureClipping.describe,
                "measured on the private data",
                "estimated",
            ),
        ),
    ),
]
