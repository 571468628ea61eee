"""The design's rules: a fault for each of them."""

from __future__ import annotations

from curvedp import Trainer
from curvedp.accounting import Ledger
from curvedp.clipping import bounded, rules
from curvedp.layers import anew, coverage, io, resolve, rounding, verify
from curvedp.layers.dense import DenseIO
from curvedp.noise import GaussianMechanism, RandomStreams, Stream
from curvedp.plan import Plan
from curvedp.sampling import PhysicalLoader
from curvedp.train import ledgers
from curvedp.train.coupling import CouplingCheck
from curvedp.train.engine import Engine
from curvedp.train.journal import Journal
from curvedp.train.noise import RunNoise
from curvedp.train.releasing import Releasing
from curvedp.train.wrapped import PrivateLoader

from . import checks, ledger_checks, rounding_checks
from .mutate import Fault, Patch

FAULTS = [
    Fault(
        "1 divisor and N",
        checks.size_does_not_show,
        (
            Patch(
                Engine.apply,
                "self.plan.sampling.expected_batch_size",
                "self._loader._size * self.plan.sampling.sample_rate",
            ),
        ),
    ),
    Fault(
        "2 one plan: bound",
        checks.noise_fits_the_bound,
        (Patch(GaussianMechanism.update, "clipped.bound > self.bound", "False"),),
    ),
    Fault(
        "2 relation and size",
        checks.size_derived_sampling_is_not_add_remove,
        (
            Patch(
                Plan.make.__func__.__globals__["_choose_relation"],
                "size_is_public and not chosen.size_is_public",
                "False",
            ),
        ),
    ),
    Fault(
        "3 NaN and Inf examples",
        checks.bad_example_is_as_if_absent,
        (
            Patch(
                bounded.clipped_sum,
                "ios = [io.keep(finite) for io in ios]",
                "ios = list(ios)",
            ),
        ),
    ),
    Fault(
        "4 empty batch",
        checks.empty_batches_count,
        (Patch(PhysicalLoader.steps, "max(1, len(drawn))", "len(drawn)"),),
    ),
    Fault(
        "5 wrong batch dimension",
        checks.time_first_is_refused,
        (
            Patch(
                verify._check_attribution,
                "if close(grads[name], expected):",
                "if close(grads[name].sum(0), expected.sum(0)):",
            ),
            Patch(verify.verify, "for j in range(size)", "for j in range(0)"),
        ),
    ),
    Fault(
        "5 loss that couples examples",
        checks.coupled_loss_is_refused,
        (
            Patch(
                verify._check_forward,
                "not close(losses[rows], check.losses(changed, mixed)[rows])",
                "False",
            ),
            Patch(verify.verify, "for j in range(size)", "for j in range(0)"),
            Patch(CouplingCheck._check, "self.rows < 2", "True"),
        ),
    ),
    Fault(
        "5 buffer changed in the forward pass",
        checks.changing_buffer_is_refused,
        (
            Patch(anew.written_anew, "if hard:", "if False:"),
            Patch(anew.written_anew, "if kept_on or", "if"),
        ),
    ),
    Fault(
        "5 unused layer",
        checks.unused_layer_is_refused,
        (
            Patch(resolve._refuse_uncalled, "not observed.calls", "False"),
            Patch(verify._refuse_unreached, "if names:", "if False:"),
            Patch(verify._check_attribution, "if name not in grads:", "if False:"),
            Patch(
                verify._check_attribution,
                "if close(grads[name], expected):",
                "if True:",
            ),
        ),
    ),
    Fault(
        "5 functional weight",
        checks.functional_weight_is_refused,
        (
            Patch(
                verify._check_attribution,
                "if close(grads[name], expected):",
                "if True:",
            ),
        ),
    ),
    Fault(
        "6 BatchNorm",
        checks.batch_norm_is_refused_with_the_replacement,
        (
            Patch(
                coverage._refuse_module, "if module.training or trainable:", "if False:"
            ),
        ),
    ),
    Fault(
        "7 paid before drawn",
        checks.paid_before_drawn,
        (
            Patch(
                Releasing.carry_out,
                "self.ledger.pay(self.step, attempt, self.noise.event(self.step))\n"
                "    release = self.noise.release(pending, attempt)",
                "release = self.noise.release(pending, attempt)\n"
                "    self.ledger.pay(self.step, attempt, self.noise.event(self.step))",
            ),
        ),
    ),
    Fault(
        "7 kept before applied",
        checks.kept_before_applied,
        (
            Patch(
                Releasing.carry_out,
                "    if self.journal is not None:\n"
                "        self.journal.write(release, group_settings(self.optimizer))\n"
                "    self.apply(release)",
                "    self.apply(release)\n"
                "    if self.journal is not None:\n"
                "        self.journal.write(release, group_settings(self.optimizer))",
            ),
        ),
    ),
    Fault(
        "7 second attempt",
        checks.second_attempt_draws_other_noise,
        (
            Patch(
                RunNoise.release,
                "replace(self._state, attempt=attempt)",
                "replace(self._state, attempt=0)",
            ),
        ),
    ),
    Fault(
        "7 a step made again is drawn again",
        checks.a_step_made_again_is_drawn_again,
        (Patch(Plan.sampler, "step, attempt(step)", "step"),),
    ),
    Fault(
        "7 no noise twice",
        checks.noise_address_is_used_once,
        (Patch(RandomStreams.generator, "if address in self._drawn:", "if False:"),),
    ),
    Fault(
        "7 ledger cut to its header",
        ledger_checks.cut_ledger_is_refused,
        (Patch(ledgers.open_with, "Ledger.open(path, check)", "Ledger.open(path)"),),
    ),
    Fault(
        "7 payment made again is cut off",
        ledger_checks.twice_paid_step_cannot_be_cut_off,
        (Patch(Journal.write, "json.dumps(ledger.head())", '"null"'),),
    ),
    Fault(
        "7 flipped release",
        ledger_checks.flipped_release_is_not_applied,
        (Patch(Journal.read, 'facts["values"] != _digest(values)', "False"),),
    ),
    Fault(
        "7 closed run",
        ledger_checks.closed_run_writes_nothing,
        (Patch(Ledger.require_open, "self._checked_descriptor()", "pass"),),
    ),
    Fault(
        "7 promise of the header",
        ledger_checks.promised_steps_are_kept,
        (Patch(ledgers._refuse_other_settings, "stored != value", "False"),),
    ),
    Fault(
        "8 budget",
        checks.budget_stops,
        (
            Patch(PrivateLoader.__iter__, "engine.steps_left == 0", "False"),
            Patch(
                Engine.batches, "min(steps, self.steps_left)", "max(1, self.steps_left)"
            ),
            Patch(Releasing.carry_out, "self.steps_left == 0", "False"),
        ),
    ),
    Fault(
        "8 lost steps",
        checks.lost_steps_are_paid_from_the_same_budget,
        (Patch(Plan.steps_left, "ledger.count()", "step"),),
    ),
    Fault(
        "10 loss reported",
        checks.loss_is_not_reported,
        (Patch(Trainer.report, "if self._show_loss else None", ""),),
    ),
    Fault(
        "10 shown loss noted",
        checks.shown_loss_is_noted,
        (Patch(Trainer._run, "if self._show_loss:", "if False:"),),
    ),
    Fault(
        "11 operating system entropy",
        checks.noise_comes_from_the_operating_system,
        (Patch(RandomStreams.__init__, "secrets.randbits(256)", "0"),),
    ),
    Fault(
        "11 separate streams",
        checks.streams_are_separate,
        (Patch(RandomStreams._sequence, "(stream.value, *address)", "address"),),
    ),
    Fault(
        "12 bound",
        checks.contribution_is_bounded,
        (Patch(rules.FlatClipping.weights, ".clamp_max(1)", ".clamp_min(1)"),),
    ),
    Fault(
        "12 rounding taken for orthogonal to the gradient",
        rounding_checks.rounding_along_a_gradient_is_covered,
        (
            Patch(
                rounding.counted,
                "return torch.maximum(norms, terms / REACH[summed_in]).square()",
                "return squares + (rounding * terms).square()",
            ),
        ),
    ),
    Fault(
        "12 float32 sums of what cancels",
        rounding_checks.what_others_cancel_is_not_rounded_away,
        (
            Patch(
                rounding.counted,
                "torch.maximum(norms, terms / REACH[summed_in])",
                "norms",
            ),
        ),
    ),
    Fault(
        "12 uses of a weight that cancel, in float32",
        rounding_checks.uses_that_cancel_do_not_round_apart,
        (Patch(io.uses_together, "summed(torch.float64)", "summed(torch.float32)"),),
    ),
    Fault(
        "12 a bias over all positions of a batch at once",
        rounding_checks.positions_that_cancel_in_a_bias_do_not_round_apart,
        (
            Patch(
                DenseIO._summed,
                "part = torch.tensordot(c, own, 1).flatten()",
                "part = (rows * c.reshape(-1, 1, 1, 1)).sum((0, 2)).flatten()",
            ),
        ),
    ),
    Fault(
        "11 masks from the public seed",
        rounding_checks.masks_and_views_are_secret,
        (Patch(Stream.is_secret, " or self in (Stream.FORWARD, Stream.VIEWS)", ""),),
    ),
    Fault(
        "13 delta",
        checks.large_delta_is_refused,
        (
            Patch(
                Plan.make.__func__.__globals__["_check_delta"],
                "delta >= 1 / size and not allow_large",
                "False",
            ),
        ),
    ),
    Fault(
        "loop: skipped batch",
        checks.skipped_batch_is_refused,
        (Patch(Engine._take_in, "if batch is None:", "if True:"),),
    ),
    Fault(
        "loop: two passes",
        checks.second_pass_is_refused,
        (
            Patch(
                Engine.forward,
                "self._open.batch is not None and self._open.recording is not None",
                "False",
            ),
        ),
    ),
]
