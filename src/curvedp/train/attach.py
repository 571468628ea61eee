"""``make_private``: from a model, an optimiser and a dataset to a private loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvedp.clipping import CurvatureClipping
from curvedp.errors import ConfigurationError, NotPrivateError
from curvedp.layers import (
    Coverage,
    PerExampleLoss,
    Synthesiser,
    cover,
    synthesiser_like,
)
from curvedp.plan import Plan
from curvedp.probes import LabelRule, Probe, PublicProbe
from curvedp.recipes import Curvature, Recipe, get_recipe
from curvedp.sampling import People, Prepare
from curvedp.train.augmenting import try_augmentation
from curvedp.train.checkpoint import kept_weight
from curvedp.train.coupling import CouplingCheck
from curvedp.train.datasets import Augment, TrainingData, chosen_views
from curvedp.train.engine import Engine
from curvedp.train.fitting import physical_rows
from curvedp.train.guard import check_optimizer, refuse_processes, refuse_rounds
from curvedp.train.journal import Journal
from curvedp.train.ledgers import open_ledger
from curvedp.train.losses import per_example_loss
from curvedp.train.measured import MeasuredSource, measured_layers
from curvedp.train.overlap import refuse_private_rows
from curvedp.train.padding import padding_tried
from curvedp.train.passes import ForwardPrecision, chosen_norms
from curvedp.train.pretrain import PublicStart
from curvedp.train.private import Private
from curvedp.train.probing import choose_labels, choose_probe, spectral_probe
from curvedp.train.rehearsal import rehearse
from curvedp.train.released import ReleasedSource
from curvedp.train.secret import RunSecret, drawing_device
from curvedp.train.settings import PrivacySettings
from curvedp.train.spectra import find_design, stored_design
from curvedp.train.whitened import CurvatureSource, FixedWhitener, WhitenerSource
from curvedp.train.whole_pass import compilable, recordable, whole_pass
from curvedp.whitening import KroneckerWhitening, SubspaceWhitening

__all__ = ["make_private"]

#: Settings of a recipe that a hand-written loop's own optimiser has.
_OF_THE_OPTIMISER = {"learning_rate", "momentum", "weight_decay"}


def make_private(  # noqa: PLR0915 (a step a line: each is called by name)
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    recipe: Recipe | str = "dp-sgd",
    loss: str | nn.Module | Callable[..., Any] | None = None,
    loss_reduction: str | None = None,
    physical_batch_size: int | str | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_options: Mapping[str, Any] | None = None,
    sample: Sequence[Any] | None = None,
    people: Sequence[Hashable] | None = None,
    examples_per_person: int | None = None,
    augment: Augment | None = None,
    views: int = 1,
    prepare: Prepare | None = None,
    run_dir: str | Path | None = None,
    journal: bool = True,
    probes: Probe | None = None,
    labels: LabelRule | None = None,
    synthetic: Synthesiser | None = None,
    seed: int | None = None,
    unsafe_reproducible_noise: int | None = None,
    cuda_graph: bool = False,
    compile: bool = False,
    precision: str | None = None,
    norm_precision: str | None = None,
    **settings: Any,
) -> Private:
    """Attach a privacy plan to a model, its optimiser and its training data.

    Args:
        model: any module without layers that mix examples. Nothing is changed in it but
            its parameters: by training, and before that by a recipe that pretrains.
        optimizer: any torch optimiser over all trainable parameters; groups, weight
            decay and schedulers keep working.
        dataset: map-style with a length, or a ``DataLoader``, of which dataset, collate
            function, workers and pinned memory are taken over.
        recipe: which method: its clipping, whitening and transforms. The optimiser is
            the user's own.
        loss: name, torch loss or function ``(output, targets) -> [B]``. It is checked
            not to mix examples, and ``private.loss`` uses it. Without it, the loss of
            the loop is trusted, and the statement says so.
        loss_reduction: only without ``loss``: "mean" (the default) or "sum", how the
            loop's own loss adds up the examples of a physical batch.
        physical_batch_size: rows of every batch that the loader yields. It bounds
            memory and has no influence on what is sampled or released. "auto" takes
            what fits into memory, found with synthetic rows.
        collate_fn: as for a ``DataLoader``. It is tried on records made up from the
            types and shapes of ``dataset[0]``, which count as public.
        loader_options: further ``DataLoader`` arguments (``num_workers``, ...).
        sample: public examples to try ``collate_fn`` on, where none can be made up.
        people: for every example, whose it is. The person is then the unit: persons are
            sampled, and all that one contributes to a step is clipped together.
            ``batch_size`` and ``sample_rate`` count persons.
        examples_per_person: declared number of examples of one person in one step.
        augment: "flips", "crops", "flips-and-crops", or a function ``(inputs,
            generator) -> inputs`` that makes a random view of each row. It is tried on
            synthetic rows, and refused if it mixes them.
        views: K, how many views of an example a step takes. Their mean gradient is
            clipped as one: sampling, noise and epsilon are those of one view.
        prepare: function ``batch -> batch`` that the loader runs last, after
            ``augment``: scaling, one-hot vectors, labels of padding. It is tried not to
            mix rows; what the loop itself does to them is refused.
        run_dir: folder for ledger, journal and checkpoints. Without it the ledger is
            in memory, and a crash loses the record of what was spent.
        journal: keep every release in the run folder until the next checkpoint, so that
            a crash loses no step that was paid for. It writes as many bytes a step as
            the model has; without it, steps since the last checkpoint are paid again.
        probes: where a recipe that whitens looks for curvature, in the place of
            synthetic inputs of the data's shape: a :class:`curvedp.probes.Probe`. For a
            recipe that pretrains, the public examples to do it on.
        labels: label rule of the probes, where the loss does not say it.
        synthetic: makes synthetic batches for the attach-time check, where shapes and
            dtypes of the data are not enough to make up valid inputs.
        seed: of the public random streams.
        unsafe_reproducible_noise: a number that makes noise and sampling reproducible,
            for tests. There is no guarantee then.
        cuda_graph: make ``private.train_on`` one CUDA graph: worth several times the
            speed for a small net, which waits for its launches otherwise. Needs a
            ``loss`` and shapes that stay; noise is what it is without.
        compile: make forward and backward pass of ``private.train_on`` one program, by
            ``torch.compile``. Needs a ``loss``; numbers are the same up to rounding.
            With ``cuda_graph``, the graph is one of the compiled pass.
        precision: "bf16" runs the forward pass under bfloat16 autocast. "bf16-kept"
            computes in float32 and keeps in bfloat16 what waits for the backward pass
            and the clipped sum: half the memory. In both, parameters, norms, clipped
            sums and noise stay float32 or better, and the bound holds.
        norm_precision: "float32" or "bf16": products that norms are taken of, in place
            of float64 where the device has it. Norms are raised by a proven bound on
            what that hides: clipping is a little stronger, the guarantee the same.
        **settings: see :class:`curvedp.train.settings.PrivacySettings`: ``epsilon`` or
            ``noise_multiplier``; ``delta``; ``batch_size`` and ``epochs``, or
            ``sample_rate``, ``steps`` and ``expected_batch_size``; ``relation``;
            ``accountant``; ``allow_large_delta``; ``secure``;
            ``independent_process``. The recipe's
            ``clip_norm``, ``clipping``, ``mode``, the settings of its transforms and,
            where it whitens or pretrains, those of :class:`curvedp.recipes.Curvature`
            and :class:`curvedp.recipes.Pretraining` are taken too, and those of
            :class:`curvedp.recipes.Correlation` where noise is correlated, with those
            of :class:`curvedp.recipes.Eigenvalues` where it is for a spectrum.

    Guarantees:
        After any number of the loop's steps, the parameters are (epsilon, delta)-DP
        with the plan's epsilon, under its relation and for what its statement covers.
    """
    refuse_rounds(run_dir)
    chosen = _chosen_recipe(recipe, settings)
    start = PublicStart.of(chosen, probes, run_dir)
    plan_settings = PrivacySettings.of(settings)
    refuse_processes(plan_settings.independent_process)
    group = _people(people, examples_per_person)
    source = TrainingData.of(
        dataset, collate_fn, loader_options, group, prepare, sample
    )
    if isinstance(probes, PublicProbe):
        refuse_private_rows(probes.dataset, source.dataset, "the probe's public data")
    plan = plan_settings.first_plan(chosen, source.size, examples_per_person)
    streams = plan.streams(seed, unsafe_reproducible_noise=unsafe_reproducible_noise)
    shown = chosen_views(augment, views, streams, group)
    checked_loss = None if loss is None else per_example_loss(loss)
    device = next(model.parameters()).device
    recorded = recordable(checked_loss, device, plan) if cuda_graph else None
    forward, norms = ForwardPrecision(precision, model), chosen_norms(norm_precision)
    programmed = compilable(checked_loss, forward) if compile else None
    if cuda_graph:
        streams.draw_in_graphs()
    template = None
    if synthetic is None:
        template = source.template(device, with_targets=checked_loss is not None)
        synthetic = synthesiser_like(template, model)
    coverage = cover(model, synthetic, checked_loss)
    tokenizer = source.tokenizer
    source = replace(
        source,
        collate=padding_tried(source.rows, model, coverage, checked_loss, prepare),
    )
    check_optimizer(model, optimizer)
    tried = rehearse(optimizer, chosen)
    curvature = _checked(chosen.curvature, coverage)
    whiteners: WhitenerSource = FixedWhitener()
    if curvature is not None and curvature.from_releases:
        plan, whiteners = _learning(model, coverage, curvature, plan, optimizer)
    elif curvature is not None:
        probe = choose_probe(
            curvature, probes, template, model, source.dataset, tokenizer
        )
        whiteners = CurvatureSource(
            model,
            coverage,
            _required(checked_loss, chosen),
            curvature.estimate(probe, choose_labels(curvature, labels, loss)),
            curvature.whitening(plan.sampling.steps, _step_length(optimizer, plan)),
            curvature.schedule(),
            streams,
        )
    rows = physical_rows(
        source,
        shown,
        plan,
        physical_batch_size,
        model,
        coverage,
        synthetic,
        checked_loss,
        forward,
    )
    if shown is not None:
        try_augmentation(
            shown, synthetic, rows, source.device, made_up=template is not None
        )
    coupling = CouplingCheck(
        model,
        coverage,
        synthetic,
        checked_loss,
        forward,
        rows,
        keep_inputs=plan.clipping.measured_sites,
        made_up=template is not None,
    ).attached()
    # The folder is touched last: nothing is left behind by what was refused above.
    folder = None if run_dir is None else Path(run_dir)
    if start is not None:
        start.take(model, _required(checked_loss, chosen), streams)
    if chosen.eigenvalues is not None:  # the plan so far has made-up noise
        designed = stored_design(folder)
        if designed is None and chosen.is_correlated:
            designed = find_design(
                model,
                coverage,
                _required(checked_loss, chosen),
                chosen.eigenvalues,
                spectral_probe(
                    chosen.eigenvalues, probes, template, model, labels, loss, tokenizer
                ),
                whiteners,
                plan.clipping,
                float(optimizer.param_groups[0]["lr"]),
                streams,
            )
        plan = plan_settings.plan(chosen, source.size, examples_per_person, designed)
    ledger = open_ledger(
        folder,
        plan,
        recipe=chosen.name,
        optimiser=type(optimizer).__name__,
        unsafe=streams.is_unsafe,
        independent=plan_settings.independent_process,
        oracle=not whiteners.provenance.is_public,
        remarks=tried.remarks,
    )
    try:
        if start is not None:
            start.keep(model)
        secret = (
            None
            if plan.correlation is None
            else RunSecret(folder, streams, ledger, drawing_device(device))
        )
        loader = source.loader(
            plan.sampler(streams, ledger.next_attempt),
            plan.sampling.expected_batch_size,
            rows,
            coverage.activation_bytes,
            device.type,
            shown,
        )
        engine = Engine(
            model=model,
            optimizer=optimizer,
            plan=plan,
            coverage=coverage,
            whiteners=whiteners,
            chain=chosen.chain,
            streams=streams,
            ledger=ledger,
            loader=loader,
            journal=Journal(folder / "journal", ledger) if folder and journal else None,
            back_map="none" if curvature is None else curvature.read_out,
            precision=forward,
            norms=norms,
            secret=secret,
            synthetic=synthetic,
            kept=partial(kept_weight, folder),
            coupling=coupling,
        )
        return Private(
            engine,
            chosen,
            loss=checked_loss,
            loss_reduction=loss_reduction,
            run_dir=folder,
            synthetic=synthetic,
            passed=whole_pass(engine, programmed, recorded, synthetic),
            tried=tried,
        ).rehearsed()
    except BaseException:
        ledger.close()  # or the folder stays locked as long as this process lives
        raise


def _chosen_recipe(recipe: Recipe | str, settings: dict[str, Any]) -> Recipe:
    """The recipe with its own settings, which are taken out of the others."""
    chosen = get_recipe(recipe)
    if not chosen.private:
        raise NotPrivateError(
            f"the recipe {chosen.name!r} has no guarantee",
            "train without make_private, or choose a private recipe",
        )
    known = ["mode", *chosen.setting_names()]
    names = [name for name in known if name not in _OF_THE_OPTIMISER]
    return chosen.configure(**{name: settings.pop(name, None) for name in names})


def _checked(curvature: Curvature | None, coverage: Coverage) -> Curvature | None:
    """Whose layers that stay unwhitened are layers of the model."""
    names = {n for p in coverage.parameters for n in (p, p.rpartition(".")[0])}
    for name in () if curvature is None else curvature.left_out:
        if name not in names:
            raise ConfigurationError(
                f"leave_out names {name!r}, and no trained layer or parameter is "
                "called so",
                f"they are: {', '.join(sorted(names - {''}))}",
            )
    return curvature


def _learning(
    model: nn.Module,
    coverage: Coverage,
    curvature: Curvature,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
) -> tuple[Plan, WhitenerSource]:
    """Who learns curvature from releases, and the plan with what is measured for it."""
    schedule, rule = curvature.schedule(), plan.clipping
    whitening = curvature.whitening(plan.sampling.steps, _step_length(optimizer, plan))
    assert not isinstance(whitening, SubspaceWhitening)  # the settings allow no other
    if not isinstance(rule, CurvatureClipping):
        assert isinstance(whitening, KroneckerWhitening)
        return plan, ReleasedSource(model, coverage, whitening, schedule)
    layers = measured_layers(model, coverage, curvature.sides, curvature.left_out)
    source = MeasuredSource(model, coverage, layers, whitening, schedule)
    return replace(plan, clipping=rule.measuring(layers)), source


def _step_length(optimizer: torch.optim.Optimizer, plan: Plan) -> float:
    """``eta C``."""
    return float(optimizer.param_groups[0]["lr"]) * plan.clipping.bound


def _required(loss: PerExampleLoss | None, recipe: Recipe) -> PerExampleLoss:
    if loss is None:
        raise ConfigurationError(
            f"the recipe {recipe.name!r} needs the loss on its own examples, to find "
            "curvature or to pretrain, and make_private was given none",
            "pass loss=..., and use private.loss in the loop",
        )
    return loss


def _people(ids: Sequence[Hashable] | None, slots: int | None) -> People | None:
    if (ids is None) != (slots is None):
        raise ConfigurationError(
            "people and examples_per_person belong together",
            "give an id for each example, and declare how many examples of one person "
            "a step may use",
        )
    return None if ids is None or slots is None else People(ids, slots)
