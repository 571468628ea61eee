"""The Trainer: any model, any per-example loss, any recipe, in one call.

    trainer = Trainer(model, "cross-entropy", "dp-sgd", epsilon=2.0, delta=1e-5,
                      batch_size=128, epochs=10)
    result = trainer.fit(dataset)
    print(result.statement)

It is written on the same ``Private`` object that hand-written loops use, so it has no
privacy logic of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.errors import ConfigurationError
from curvedp.noise import RandomStreams, Stream
from curvedp.plan import SamplingPlan
from curvedp.probes import LabelRule, Probe
from curvedp.recipes import Recipe, get_recipe
from curvedp.sampling import PhysicalLoader, PoissonSampler, Prepare
from curvedp.train.attach import make_private
from curvedp.train.datasets import Augment, TrainingData, chosen_views
from curvedp.train.explained import StepPlan
from curvedp.train.fitting import AUTO
from curvedp.train.losses import per_example_loss
from curvedp.train.observers import EarlyStopping, Progress
from curvedp.train.overlap import refuse_private_rows
from curvedp.train.passes import ForwardPrecision
from curvedp.train.plain import fit_without_privacy
from curvedp.train.private import Private
from curvedp.train.settings import PrivacySettings
from curvedp.train.statement import Statement

__all__ = ["FitResult", "Progress", "Trainer"]

Observer = Callable[[Progress], None]


@dataclass(frozen=True)
class FitResult:
    """How a training run ended.

    Attributes:
        steps: logical steps made.
        finished: False if it was asked to stop before.
        stopped_early: True if a metric on public data ended it.
        seconds: of this call. They tell the number of examples, which may be private.
        statement: the privacy statement; None for the non-private reference.
    """

    steps: int
    finished: bool
    seconds: float
    statement: Statement | None
    stopped_early: bool = False


class Trainer:
    """Trains a model under a recipe.

    Args:
        model: any module (see :func:`curvedp.make_private`).
        loss: name, torch loss or function ``(output, targets) -> [B]``.
        recipe: name or :class:`Recipe`; its settings can be given as arguments
            (``learning_rate``, ``momentum``, ``weight_decay``, ``clip_norm``,
            ``clipping``).
        run_dir: folder for ledger, journal and checkpoints; without it, nothing is
            written and nothing survives a crash.
        checkpoint_every: steps between checkpoints. The journal holds the releases of
            up to twice as many steps.
        journal: keep every release until the next checkpoint.
        physical_batch_size: rows of a physical batch; bounds memory. "auto" takes what
            fits.
        seed: of the public random streams (dropout and the like).
        unsafe_reproducible_noise: for tests; see :func:`curvedp.make_private`.
        show_private_training_loss: pass the training loss to ``on_progress``. It is a
            private quantity that nobody paid for; the ledger notes it.
        on_progress: called after every logical step, with public quantities
            (:class:`CsvLog`, :class:`TensorBoardLog` or a function); one or several.
        early_stopping: ends the run by a metric on data that is declared public.
        collate_fn: as for a ``DataLoader``; it is tried on made-up records.
        sample: public examples to try it on, where none can be made up.
        people: for every example, whose it is, if the person is the unit.
        examples_per_person: declared number of examples of a person in a step.
        augment: random views of the inputs; see :func:`curvedp.make_private`.
        views: how many of them are averaged before clipping.
        prepare: run by the loader on each batch; see :func:`curvedp.make_private`.
        loader_options: further ``DataLoader`` arguments.
        probes: where a recipe that whitens looks for curvature; see
            :func:`curvedp.make_private`.
        labels: label rule of the probes, where the loss does not say it.
        cuda_graph: make each pass one CUDA graph; see :func:`curvedp.make_private`.
        compile: compile each pass; see :func:`curvedp.make_private`.
        precision: "bf16" for bfloat16 autocast, "bf16-kept" to keep in bfloat16 what
            waits; see :func:`curvedp.make_private`.
        norm_precision: of the norms; see :func:`curvedp.make_private`.
        **settings: privacy settings, as for :func:`curvedp.make_private`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | nn.Module | Callable[..., Any],
        recipe: Recipe | str = "dp-sgd",
        *,
        run_dir: str | Path | None = None,
        checkpoint_every: int = 20,
        journal: bool = True,
        physical_batch_size: int | str | None = None,
        seed: int | None = None,
        unsafe_reproducible_noise: int | None = None,
        show_private_training_loss: bool = False,
        on_progress: Observer | Sequence[Observer] = (),
        early_stopping: EarlyStopping | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sample: Sequence[Any] | None = None,
        people: Sequence[Hashable] | None = None,
        examples_per_person: int | None = None,
        augment: Augment | None = None,
        views: int = 1,
        prepare: Prepare | None = None,
        loader_options: Mapping[str, Any] | None = None,
        probes: Probe | None = None,
        labels: LabelRule | None = None,
        cuda_graph: bool = False,
        compile: bool = False,
        precision: str | None = None,
        norm_precision: str | None = None,
        **settings: Any,
    ) -> None:
        names = ["mode", *get_recipe(recipe).setting_names()]
        own = {n: settings.pop(n) for n in names if n in settings}
        self.model = model
        self.recipe = get_recipe(recipe).configure(**own)
        self._loss = per_example_loss(loss)
        self._given_loss = loss
        self._probes, self._labels = probes, labels
        self._settings = PrivacySettings.of(settings)
        self._given = settings
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._checkpoint_every = checkpoint_every
        self._journal = journal
        self._physical = physical_batch_size
        self._streams = RandomStreams(
            seed, unsafe_reproducible_noise=unsafe_reproducible_noise
        )
        if not self.recipe.private and unsafe_reproducible_noise is None:
            # nothing is promised about a reference: all of it follows from the seed
            self._streams = RandomStreams(
                self._streams.seed, unsafe_reproducible_noise=self._streams.seed
            )
        self._unsafe = unsafe_reproducible_noise
        self._show_loss = show_private_training_loss
        self._observers = [on_progress] if callable(on_progress) else [*on_progress]
        self._early_stopping = early_stopping
        self._collate, self._sample = collate_fn, sample
        self._people = people
        self._slots = examples_per_person
        self._augment, self._views, self._prepare = augment, views, prepare
        self._loader_options = loader_options
        self._cuda_graph, self._compile = cuda_graph, compile
        self.forward_precision = ForwardPrecision(precision, model)
        self._precision, self._norm_precision = precision, norm_precision
        self._stop = False

    def request_stop(self) -> None:
        """Stop after the step in progress; safe to call from a signal handler."""
        self._stop = True

    def fit(self, dataset: Any, *, resume: bool = False) -> FitResult:
        """Train on a map-style dataset of ``(inputs, targets)`` pairs.

        Args:
            dataset: the private data.
            resume: go on from the run folder's last checkpoint and journal.
        """
        started = time.monotonic()
        try:
            return self._fit(dataset, resume, started)
        finally:
            self._stop = False  # at the end: a request may come before the first step

    def _fit(self, dataset: Any, resume: bool, started: float) -> FitResult:
        optimiser = self.recipe.make_optimiser(
            p for p in self.model.parameters() if p.requires_grad
        )
        if self._early_stopping is not None and self.recipe.private:
            shown = self._early_stopping.public_data
            refuse_private_rows(shown, dataset, "the public data of early_stopping")
        if not self.recipe.private:
            if resume:
                raise ConfigurationError(
                    "a non-private reference keeps no state to resume from",
                    "start it again",
                )
            steps = fit_without_privacy(self, optimiser, dataset)
            finished = not self._stop
            return FitResult(steps, finished, time.monotonic() - started, None)
        with self._attach(optimiser, dataset, self.recipe, self._run_dir) as private:
            if resume:
                private.resume()
            elif self._run_dir is not None:
                if private.steps_left() < private.plan.sampling.steps:
                    raise ConfigurationError(
                        f"{self._run_dir} holds a run already",
                        "resume it, or give this run a folder of its own",
                    )
                private.save()
            finished = self._run(private)
            early = not finished and not self.stop_requested()
            if early:
                private.note(
                    "stopped early by a metric on data that is declared public; the "
                    "planned epsilon holds"
                )
            if self._run_dir is not None:
                private.save()
            seconds = time.monotonic() - started
            return FitResult(
                private.step, finished or early, seconds, private.statement(), early
            )

    def explain(self, dataset: Any) -> StepPlan:
        """What a step would do with each layer and what it takes; nothing is trained.

        Args:
            dataset: as for ``fit``; shapes are all that is taken from it, unless the
                recipe takes curvature from it.
        """
        if not self.recipe.private:
            raise ConfigurationError(
                f"the recipe {self.recipe.name!r} makes ordinary steps: there is "
                "nothing to explain",
                "choose a private recipe",
            )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # nothing is written or paid, and the model stays as it is
        alone = replace(self.recipe, pretraining=None, eigenvalues=None, search={})
        optimiser = alone.make_optimiser(trained)
        with self._attach(optimiser, dataset, alone, None) as private:
            return private.explain()

    def _attach(
        self,
        optimiser: torch.optim.Optimizer,
        dataset: Any,
        recipe: Recipe,
        run_dir: Path | None,
    ) -> Private:
        return make_private(
            self.model,
            optimiser,
            dataset,
            recipe=recipe,
            loss=self._given_loss,
            probes=self._probes,
            labels=self._labels,
            physical_batch_size=self._physical,
            run_dir=run_dir,
            journal=self._journal,
            seed=self._streams.seed,
            unsafe_reproducible_noise=self._unsafe,
            collate_fn=self._collate,
            sample=self._sample,
            people=self._people,
            examples_per_person=self._slots,
            augment=self._augment,
            views=self._views,
            prepare=self._prepare,
            loader_options=self._loader_options,
            cuda_graph=self._cuda_graph,
            compile=self._compile,
            precision=self._precision,
            norm_precision=self._norm_precision,
            **self._given,
        )

    def _run(self, private: Private) -> bool:
        """Steps until the budget is used up (True), or it is to stop (False)."""
        if self._show_loss:
            private.note("the private training loss was shown while training")
        device = next(self.model.parameters()).device
        total = private.plan.sampling.steps
        private.model.train()
        watch = self._watch()
        with self.reproducible_forward(device) as seed_step:
            seeded = -1
            while private.steps_left():
                if self.stop_requested():
                    return False
                for batch in private.loader:
                    # after the fetch, which may draw from the global generator too
                    if seeded != (seeded := private.step):
                        seed_step(private.step)
                    loss = private.train_on(tuple(batch))
                    if private.step == seeded:
                        continue  # more of this logical batch is to come
                    rate = private.optimizer.param_groups[0]["lr"]
                    self.report(private.step, total, rate, loss)
                    if self.stop_requested() or watch(private.step):
                        return private.steps_left() == 0
                    if self._run_dir and private.step % self._checkpoint_every == 0:
                        private.save()
        return True

    # -- shared with the non-private reference ----------------------------------------

    @property
    def loss(self) -> Callable[[Any, Any], Tensor]:
        """The per-example loss."""
        return self._loss

    def stop_requested(self) -> bool:
        """Whether somebody asked to stop."""
        return self._stop

    @property
    def settings(self) -> PrivacySettings:
        """The privacy settings as given."""
        return self._settings

    def _watch(self) -> Callable[[int], bool]:
        if self._early_stopping is None:
            return lambda _: False
        return self._early_stopping.watcher(self.model, self._loss)

    def report(self, step: int, steps: int, rate: float, loss: Tensor) -> None:
        """Tell whoever watches; the loss only if it was asked for."""
        shown = float(loss.detach()) if self._show_loss else None
        for observer in self._observers:
            observer(Progress(step, steps, float(rate), shown))

    def loader(self, dataset: Any, sampling: SamplingPlan) -> PhysicalLoader:
        """Batches for the non-private reference, drawn as a private run draws them."""
        streams = RandomStreams(unsafe_reproducible_noise=self._streams.seed)
        sampler = PoissonSampler(
            sampling.sample_rate, lambda step: streams.generator(Stream.SAMPLING, step)
        )
        source = TrainingData.of(
            dataset,
            self._collate,
            self._loader_options,
            prepare=self._prepare,
            sample=self._sample,
        )
        views = chosen_views(self._augment, self._views, self._streams)
        # a reference keeps no per-example values: the default fits where a run would
        size = None if self._physical == AUTO else self._physical
        return source.loader(sampler, sampling.expected_batch_size, size, views=views)

    @contextmanager
    def reproducible_forward(
        self, device: torch.device
    ) -> Iterator[Callable[[int], None]]:
        """Dropout and the like draw from a secret stream of their own.

        It is addressed by step, and the caller's global random state is left alone.
        """
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            yield lambda step: _seed(self._streams, step)


def _seed(streams: RandomStreams, step: int) -> None:
    torch.manual_seed(streams.torch_seed(Stream.FORWARD, step) % 2**63)
