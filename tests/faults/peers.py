"""Silent failures measured in other libraries, and what keeps them out of this one.

One entry for each failure, by library; every check has a fault, in ``rule_faults`` or
``peer_faults``, that makes it fail. The models and loops are in ``cases``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import checks, correlated_faults, peer_data, peer_models, peer_runs, peer_sums


@dataclass(frozen=True)
class Clause:
    """A failure as it was seen, and the checks that guard against it."""

    where: str
    failure: str
    checks: tuple[Callable[[], None], ...]


_OPACUS = "Opacus 1.6"
_DPKFC = "DP-KFC's code"
_OPAKE = "Opake's audit"
_FLASHDP = "FlashDP's code"
_SEVERAL = "several"

PEERS = (
    Clause(
        _OPACUS,
        "the divisor depends on the private number of examples",
        (checks.size_does_not_show, checks.size_derived_sampling_is_not_add_remove),
    ),
    Clause(
        "Opacus, fastDP, DP-KFC, Flower",
        "one NaN or Inf example reaches the whole model, or skips the clipping",
        (checks.bad_example_is_as_if_absent, peer_sums.bad_target_is_as_if_absent),
    ),
    Clause(
        "ghost clipping",
        "a weight used functionally is ignored: one example contributes 43.6 C",
        (checks.functional_weight_is_refused,),
    ),
    Clause(
        _OPACUS,
        "resume with a seeded generator replays the same noise",
        (
            checks.second_attempt_draws_other_noise,
            checks.a_step_made_again_is_drawn_again,
            checks.noise_address_is_used_once,
            checks.noise_comes_from_the_operating_system,
            peer_sums.resumed_run_draws_new_noise,
            peer_sums.seeding_torch_does_not_seed_the_noise,
        ),
    ),
    Clause(
        _OPACUS,
        "without Poisson sampling the Poisson epsilon is reported",
        (
            peer_data.draws_are_poisson_as_accounted,
            peer_data.secure_draws_are_poisson_as_accounted,
            peer_data.sampling_options_are_refused,
            peer_data.batches_of_another_loader_are_refused,
        ),
    ),
    Clause(
        _OPACUS,
        "distributed Poisson sampling drops empty batches: ranks disagree on steps",
        (
            checks.empty_batches_count,
            peer_data.several_processes_are_refused,
            peer_data.processes_started_later_are_refused,
            peer_models.models_over_several_devices_are_refused,
        ),
    ),
    Clause(
        _SEVERAL,
        "bf16 clipping overshoots C by 0.65 %",
        (
            checks.contribution_is_bounded,
            peer_sums.bound_holds_in_bfloat16,
            peer_sums.bound_holds_under_autocast,
        ),
    ),
    Clause(
        _OPACUS,
        "adaptive clipping is accounted with half its sensitivity",
        (
            checks.noise_fits_the_bound,
            peer_sums.adaptive_contribution_is_bounded,
            peer_sums.adaptive_count_gets_the_same_noise,
            peer_sums.replacing_an_example_costs_twice_the_distance,
        ),
    ),
    Clause(_SEVERAL, "an unused layer", (checks.unused_layer_is_refused,)),
    Clause(
        _SEVERAL,
        "a broadcast position embedding",
        (peer_models.broadcast_positions_are_exact, checks.time_first_is_refused),
    ),
    Clause(
        _SEVERAL,
        "a module called twice",
        (peer_models.a_module_called_twice_is_exact, checks.second_pass_is_refused),
    ),
    Clause(
        _OPACUS,
        "LoRA weights that never move, 45 GPU hours lost",
        (
            peer_models.adapters_move_and_the_rest_stays,
            peer_models.forgotten_adapter_is_refused,
            peer_models.detached_adapter_is_refused,
            peer_models.adapter_scaled_by_zero_is_refused,
            peer_models.optimiser_without_the_adapter_is_refused,
            peer_models.unfreezing_after_attaching_is_refused,
            peer_models.freezing_after_attaching_is_refused,
            peer_models.exchanging_after_attaching_is_refused,
            peer_models.gradient_that_nobody_clipped_is_refused,
        ),
    ),
    Clause(
        _OPACUS,
        "WeightedRandomSampler(128 of 100 000) gives q = 0.125 instead of 0.00016",
        (peer_data.other_samplers_are_refused,),
    ),
    Clause(
        _OPACUS,
        "an empty batch crashes",
        (
            checks.empty_batches_count,
            peer_data.empty_batches_count_with_a_collate_function,
        ),
    ),
    Clause(_OPACUS, "secure mode does not install", (peer_sums.secure_mode_works,)),
    Clause(
        _DPKFC,
        "shuffled batches accounted as Poisson",
        (peer_data.draws_are_poisson_as_accounted,),
    ),
    Clause(
        _DPKFC,
        "TF-IDF fitted on private text",
        (
            peer_data.nothing_is_fitted_on_records,
            peer_data.undeclared_vocabulary_is_refused,
            peer_data.preprocessing_is_said_not_to_be_covered,
            peer_data.attaching_sees_no_value,
        ),
    ),
    Clause(
        _DPKFC,
        "the un-noised loss is saved",
        (
            checks.loss_is_not_reported,
            checks.shown_loss_is_noted,
            peer_data.loss_is_in_no_file,
        ),
    ),
    Clause(_DPKFC, "bias-free layers crash", (peer_models.bias_free_layers_are_exact,)),
    Clause(_DPKFC, "LoRA crashes", (peer_models.adapters_are_exact,)),
    Clause(
        _DPKFC, "non-square images crash", (peer_models.non_square_images_are_exact,)
    ),
    Clause(
        "Opacus distributed",
        "ranks draw the same positions, or whole noise on each",
        (
            peer_data.several_processes_are_refused,
            peer_data.processes_started_later_are_refused,
        ),
    ),
    Clause(
        _OPAKE,
        "resume installs one rank's sampler key on all: 0.199 printed, 2.40 true",
        (
            peer_data.several_processes_are_refused,
            checks.a_step_made_again_is_drawn_again,
            peer_runs.resumed_examples_stay_in_their_groups,
            peer_runs.other_groups_cost_what_they_add,
        ),
    ),
    Clause(
        _OPAKE,
        "batch size changed on resume, the sampler keeps the old q",
        (peer_runs.resumed_run_has_its_rate, peer_runs.stored_state_has_its_rate),
    ),
    Clause(
        _OPAKE,
        "LoRA resume loads no adapter weights while ledger and noise go on",
        (peer_runs.resumed_adapter_has_its_weights,),
    ),
    Clause(
        _OPAKE,
        "tied embeddings crash after the budget is spent",
        (
            peer_runs.tied_embeddings_train,
            peer_runs.a_crash_before_the_sum_is_unpaid,
        ),
    ),
    Clause(
        _OPAKE,
        "correlated-noise state without the strategy's identity",
        (
            peer_runs.another_strategys_noise_is_not_taken_back,
            correlated_faults.noise_is_taken_back_in_its_own_frame,
        ),
    ),
    Clause(
        _OPAKE,
        "a clipped count priced at half its sensitivity",
        (
            peer_sums.adaptive_contribution_is_bounded,
            peer_sums.adaptive_count_gets_the_same_noise,
        ),
    ),
    Clause(
        _FLASHDP,
        "noise of s / sqrt(B) on the mean",
        (peer_runs.noise_does_not_depend_on_the_batch,),
    ),
    Clause(_FLASHDP, "uninitialised norms", (checks.contribution_is_bounded,)),
    Clause(
        _FLASHDP,
        "clipping by blocks called per example",
        (peer_runs.layers_share_the_bound,),
    ),
)
