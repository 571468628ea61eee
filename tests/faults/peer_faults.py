"""The failures of other libraries, planted here: each makes a check fail."""

from __future__ import annotations

from curvedp import Trainer
from curvedp.accounting import accountants
from curvedp.clipping import AdaptiveClipping, bounded
from curvedp.data import table
from curvedp.data.schema import Schema
from curvedp.layers import coverage, dead, dense, direct, resolve, rules, verify
from curvedp.layers.capture import Recording
from curvedp.layers.conv import ConvGeometry
from curvedp.noise import RandomStreams, SecureStreams, secure
from curvedp.plan import Plan
from curvedp.sampling import PhysicalLoader, PoissonSampler, physical, rows
from curvedp.train import CsvLog, datasets, guard, statement
from curvedp.train.engine import Engine
from curvedp.train.noise import RunNoise
from curvedp.update import torch_optim

from . import peer_data, peer_models, peer_sums
from .mutate import Fault, Patch

#: Attaching takes the rules' word: what a library without such a check would do.
UNVERIFIED = Patch(
    verify.verify, "size = EXAMPLES if", "return\n    size = EXAMPLES if"
)


def fault(rule, check, *patches):
    """A patch is a function, a text in it, and what to put there."""
    made = tuple(p if isinstance(p, Patch) else Patch(*p) for p in patches)
    return Fault(rule, check, made)


_SUMS = [
    fault(
        "a target that is not a number is weighted by zero",
        peer_sums.bad_target_is_as_if_absent,
        (bounded.clipped_sum, "[io.keep(finite) for io in ios]", "list(ios)"),
    ),
    fault(
        "norms in bfloat16",
        peer_sums.bound_holds_in_bfloat16,
        (
            bounded.clipped_sum,
            ".weights(lengths)",
            ".weights(lengths.bfloat16()).to(lengths)",
        ),
    ),
    fault(
        "autocast inside the clipping",
        peer_sums.bound_holds_under_autocast,
        (
            bounded.clipped_sum,
            "with exact(device), norms_in(norms):",
            "with torch.no_grad():",
        ),
    ),
    fault(
        "a count with twice the sensitivity",
        peer_sums.adaptive_contribution_is_bounded,
        (AdaptiveClipping.extras, "self.share * SHRINK", "2 * self.share * SHRINK"),
    ),
    fault(
        "a bound for the gradient alone",
        peer_sums.adaptive_contribution_is_bounded,
        (
            bounded.clipped_sum,
            "ClippedSum(summed, rule.bound",
            "ClippedSum(summed, 1.0",
        ),
    ),
    fault(
        "a count with half the noise",
        peer_sums.adaptive_count_gets_the_same_noise,
        (
            RandomStreams.add_gaussian,
            "torch._foreach_add(plain, normals, alpha=std)",
            "[v + std * (n if v.dim() else 0.5 * n) for v, n in zip(plain, normals)]",
        ),
    ),
    fault(
        "replacing accounted as removing",
        peer_sums.replacing_an_example_costs_twice_the_distance,
        (accountants._relation, "_RELATIONS[relation]", '"ADD_OR_REMOVE_ONE"'),
    ),
    fault(
        "noise of a resumed run",
        peer_sums.resumed_run_draws_new_noise,
        (
            RunNoise.release,
            "replace(self._state, attempt=attempt)",
            "self._state",
        ),
    ),
    fault(
        "noise from the public seed",
        peer_sums.seeding_torch_does_not_seed_the_noise,
        (RandomStreams.__init__, "secrets.randbits(256)", "self.seed"),
    ),
    fault(
        "noise from torch's global generator",
        peer_sums.seeding_torch_does_not_seed_the_noise,
        (
            RandomStreams.__init__,
            "secrets.randbits(256)",
            "int(torch.randint(2**62, ()))",
        ),
    ),
    fault(
        "secure mode with numpy's noise",
        peer_sums.secure_mode_works,
        (Plan.streams, "if not self.secure:", "if True:"),
    ),
    fault(
        "secure noise of half the size",
        peer_sums.secure_mode_works,
        (SecureStreams.add_gaussian, "std / grid.spacing", "std / grid.spacing / 2"),
    ),
]

_DATA = [
    fault(
        "batches of a fixed size",
        peer_data.draws_are_poisson_as_accounted,
        (
            PoissonSampler.draw,
            "rng.binomial(population, self.sample_rate)",
            "round(population * self.sample_rate)",
        ),
    ),
    fault(
        "an epoch cut into batches",
        peer_data.draws_are_poisson_as_accounted,
        (
            PhysicalLoader.steps,
            "self._sampler.draw(step, self._size)",
            "np.arange(step % 2, self._size, 2)",
        ),
    ),
    fault(
        "everybody once an epoch",
        peer_data.draws_are_poisson_as_accounted,
        (
            PhysicalLoader.steps,
            "self._sampler.draw(step, self._size)",
            "self._sampler.draw(step - step % 2, self._size)\n"
            "            if step % 2:\n"
            "                drawn = np.setdiff1d(np.arange(self._size), drawn)",
        ),
    ),
    fault(
        "another rate accounted than drawn",
        peer_data.draws_are_poisson_as_accounted,
        (Plan.step_event, "event(self.event_rate)", "event(self.event_rate / 2)"),
    ),
    fault(
        "coins that fall too rarely",
        peer_data.secure_draws_are_poisson_as_accounted,
        (secure._CoinSampler.draw, "2.0**64)", "2.0**63)"),
    ),
    fault(
        "weighted and shared samplers",
        peer_data.other_samplers_are_refused,
        (datasets._refuse_sampler, "if not plain or", "if False and"),
    ),
    fault(
        "shuffle as an option",
        peer_data.sampling_options_are_refused,
        (datasets.TrainingData.of.__func__, "if fixed:", "if False:"),
    ),
    fault(
        "any batch will do",
        peer_data.batches_of_another_loader_are_refused,
        (Engine.require_backward, "if batch is None:", "if False:"),
    ),
    fault(
        "collating nothing",
        peer_data.empty_batches_count_with_a_collate_function,
        (
            physical._PaddedCollate.__call__,
            "(examples) if examples else self.empty",
            "(examples)",
        ),
    ),
    fault(
        "skipping empty draws",
        peer_data.empty_batches_count_with_a_collate_function,
        (PhysicalLoader.steps, "max(1, len(drawn))", "len(drawn)"),
    ),
    fault(
        "a model in each process",
        peer_data.several_processes_are_refused,
        (guard.refuse_processes, "if size > 1:", "if False:"),
    ),
    fault(
        "processes started after attaching",
        peer_data.processes_started_later_are_refused,
        (Engine.batches, "refuse_processes(", "bool("),
    ),
    fault(
        "columns standardised by their own mean",
        peer_data.nothing_is_fitted_on_records,
        (
            table._load_part,
            "x[:rows_read].copy()",
            "x[:rows_read] - x[:rows_read].mean(0)",
        ),
    ),
    fault(
        "columns guessed from the records",
        peer_data.undeclared_vocabulary_is_refused,
        (Schema.__post_init__, "if not self.columns:", "if False:"),
    ),
    fault(
        "a statement that covers preprocessing",
        peer_data.preprocessing_is_said_not_to_be_covered,
        (statement.make_statement, "else _NOT_COVERED)", "else _NOT_COVERED[2:])"),
    ),
    fault(
        "a private example as padding",
        peer_data.attaching_sees_no_value,
        (rows._template, "torch.zeros_like(x) if isinstance(x, Tensor) else x", "x"),
    ),
    fault(
        "a private example through collate",
        peer_data.attaching_sees_no_value,
        (
            rows.RowCollate.of.__func__,
            "trial.collated([records.make(0)])",
            "trial.collated([dataset[0]])",
        ),
    ),
    fault(
        "the loss in the log",
        peer_data.loss_is_in_no_file,
        (CsvLog.__call__, "progress.learning_rate]", "progress.private_loss]"),
    ),
    fault(
        "the loss in the checkpoint",
        peer_data.loss_is_in_no_file,
        (
            Trainer._run,
            "private.save()",
            'private.save({"loss": float(loss.detach())})',
        ),
    ),
]

_MODELS = [
    fault(
        "positions read as examples",
        peer_models.broadcast_positions_are_exact,
        (resolve._shared_layout, "if not tensors or", "if True or"),
        UNVERIFIED,
    ),
    fault(
        "everybody gets the mean gradient of a broadcast parameter",
        peer_models.broadcast_positions_are_exact,
        (
            direct.ExpandedServer.layer_io,
            "else leaf.grad",
            "else leaf.grad.mean(0, keepdim=True).expand_as(leaf)",
        ),
        UNVERIFIED,
    ),
    fault(
        "the last call of a module alone",
        peer_models.a_module_called_twice_is_exact,
        (Recording._layer_io, "if c.reached]", "if c.reached][-1:]"),
        UNVERIFIED,
    ),
    fault(
        "the norm of a bias that is not there",
        peer_models.bias_free_layers_are_exact,
        (dense.outer_sq_norms, " if bias else 0.0", ""),
        (dense._sq_spread, " if bias else 0.0", ""),
        UNVERIFIED,
    ),
    fault(
        "height and width confused",
        peer_models.non_square_images_are_exact,
        (
            ConvGeometry._patches,
            "self.stride, self.dilation",
            "self.stride[::-1], self.dilation",
        ),
        UNVERIFIED,
    ),
    fault(
        "an adapter taken for the linear layer that it extends",
        peer_models.adapters_are_exact,
        (rules.find_rule, 'own <= {"weight", "bias"}', "True"),
        (rules.find_rule, "type(module).forward is base.forward", "True"),
        UNVERIFIED,
    ),
    fault(
        "only the first parameter moves",
        peer_models.adapters_move_and_the_rest_stays,
        (
            torch_optim.apply_release,
            "in parameters.items():\n        parameter.grad",
            "in list(parameters.items())[:1]:\n        parameter.grad",
        ),
    ),
    fault(
        "an adapter that is never called",
        peer_models.forgotten_adapter_is_refused,
        (resolve._refuse_uncalled, "not observed.calls", "False"),
        UNVERIFIED,
    ),
    fault(
        "an adapter cut off from the loss",
        peer_models.detached_adapter_is_refused,
        UNVERIFIED,
    ),
    fault(
        "an adapter that is multiplied by zero",
        peer_models.adapter_scaled_by_zero_is_refused,
        (dead.refuse_dead, "if dead:", "if False:"),
    ),
    fault(
        "an adapter that the optimiser does not know",
        peer_models.optimiser_without_the_adapter_is_refused,
        (guard.check_optimizer, "if missing:", "if False:"),
    ),
    fault(
        "unfrozen afterwards",
        peer_models.unfreezing_after_attaching_is_refused,
        (guard.refuse_changes, "if p.requires_grad and", "if False and"),
        (guard.refuse_foreign_gradients, "p.grad is not None", "False"),
    ),
    fault(
        "frozen afterwards",
        peer_models.freezing_after_attaching_is_refused,
        (guard.refuse_changes, "if not p.requires_grad:", "if False:"),
    ),
    fault(
        "exchanged afterwards",
        peer_models.exchanging_after_attaching_is_refused,
        (guard.refuse_changes, "if id(p) not in found:", "if False:"),
        (guard.check_optimizer, "if foreign:", "if False:"),
    ),
    fault(
        "a gradient from elsewhere",
        peer_models.gradient_that_nobody_clipped_is_refused,
        (guard.refuse_foreign_gradients, "p.grad is not None", "False"),
    ),
    fault(
        "a model over several devices",
        peer_models.models_over_several_devices_are_refused,
        (coverage._refuse_module, "if wrappers:", "if False:"),
    ),
]

FAULTS = _SUMS + _DATA + _MODELS
