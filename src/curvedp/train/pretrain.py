"""Before the first private step: parameters from public data.

The private data has no part in it: what comes out is a function of the initial
parameters, of the public dataset and of public random streams. They are kept in the
run's folder, so that a run that is resumed without a checkpoint starts from the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvedp.barrier import Provenance
from curvedp.curvature.products import evaluated
from curvedp.errors import ConfigurationError
from curvedp.layers import PerExampleLoss, as_call
from curvedp.layers.coverage import set_training_mode
from curvedp.noise import RandomStreams, Stream
from curvedp.probes import Probe, PublicProbe
from curvedp.recipes import Pretraining, Recipe
from curvedp.storage import json_text, write_atomically
from curvedp.train.checkpoint import checkpoint_folders
from curvedp.train.contrast import Contrast
from curvedp.train.datasets import moved
from curvedp.train.tensors import read_tensors, write_tensors

__all__ = ["PublicStart", "pretrain", "public_examples"]

#: In a run's folder: the parameters before the first private step.
PRETRAINED = "pretrained.safetensors"


def public_examples(probe: Probe | None) -> PublicProbe:
    """The public dataset to pretrain on.

    Raises:
        ConfigurationError: there is none, or it is not one with examples.
    """
    if probe is None:
        raise ConfigurationError(
            "the recipe pretrains on public data, and none was given",
            "pass probes=PublicProbe(dataset) with examples that are declared public "
            "(on the command line --public-data)",
        )
    if not isinstance(probe, PublicProbe) or probe.provenance is not Provenance.PUBLIC:
        raise ConfigurationError(
            f"the recipe pretrains on public examples, and a {type(probe).__name__} "
            "is not a set of them",
            "pass probes=PublicProbe(dataset)",
        )
    return probe


@dataclass(frozen=True)
class PublicStart:
    """Where a run starts that pretrains, now or in an earlier sitting.

    Pretraining may take long, and another device or another seed would end elsewhere:
    what came out is kept in the run's folder.

    Attributes:
        how: settings.
        public: examples.
        run_dir: of the run, or None.
    """

    how: Pretraining
    public: PublicProbe
    run_dir: Path | None

    @classmethod
    def of(
        cls, recipe: Recipe, probe: Probe | None, run_dir: str | Path | None
    ) -> PublicStart | None:
        """None for a recipe that does not pretrain."""
        if recipe.pretraining is None or not recipe.pretrains:
            return None
        folder = None if run_dir is None else Path(run_dir)
        return cls(recipe.pretraining, public_examples(probe), folder)

    @property
    def overtaken(self) -> bool:
        """Whether a checkpoint will take the place of these parameters."""
        folder = self.run_dir
        return folder is not None and bool(checkpoint_folders(folder / "checkpoints"))

    def take(
        self, model: nn.Module, loss: PerExampleLoss, streams: RandomStreams
    ) -> None:
        """Give the model the parameters to start from."""
        if not self.overtaken and not self._restored(model):
            pretrain(model, loss, self.public, self.how, streams)

    def keep(self, model: nn.Module) -> None:
        """Write the parameters into the run's folder, once. They are public."""
        if self.run_dir is None or self.overtaken:
            return
        path, named = self.run_dir / PRETRAINED, dict(model.named_parameters())
        facts = {"kind": "curvedp-pretrained", "settings": json_text(self.how.facts())}
        if not path.exists():
            write_atomically(path, lambda beside: write_tensors(beside, named, facts))

    def _restored(self, model: nn.Module) -> bool:
        path = None if self.run_dir is None else self.run_dir / PRETRAINED
        if path is None or not path.exists():
            return False
        stored, facts = read_tensors(path)
        shapes = {n: p.shape for n, p in model.named_parameters()}
        # of other settings: another run, which the ledger will refuse
        fits = shapes == {n: t.shape for n, t in stored.items()}
        if not fits or facts.get("settings") != json_text(self.how.facts()):
            return False
        model.load_state_dict(stored, strict=False)  # buffers are as they were
        return True


def pretrain(
    model: nn.Module,
    loss: PerExampleLoss,
    public: PublicProbe,
    how: Pretraining,
    streams: RandomStreams,
) -> None:
    """Move the model's trainable parameters by SGD on public examples.

    Args:
        model: its parameters are changed, its mode is not.
        loss: per-example loss; its mean over a batch is minimised. SimCLR has its own.
        public: examples, with labels where their own are to be learnt.
        how: epochs, batch size, learning rate, labels.
        streams: the public stream of pretraining is in them.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    seed = streams.torch_seed(Stream.PRETRAINING) % 2**63
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)  # dropout, and what SimCLR puts behind the model
        step = _objective(model, loss, public, how, generator)
        optimiser = torch.optim.SGD(
            [*parameters, *step.more_parameters],
            lr=how.pretrain_learning_rate,
            momentum=how.pretrain_momentum,
        )
        set_training_mode(model)
        for _ in range(how.steps(len(public.dataset))):
            optimiser.zero_grad()
            torch.autograd.backward(step())
            optimiser.step()
    set_training_mode(model, was_training)
    for parameter in parameters:
        parameter.grad = None  # one that is found later came from elsewhere
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise ConfigurationError(
            "pretraining on the public data diverged",
            "set a smaller pretrain_learning_rate",
        )


def _objective(
    model: nn.Module,
    loss: PerExampleLoss,
    public: PublicProbe,
    how: Pretraining,
    generator: torch.Generator,
) -> _Labelled | _Views:
    if how.pretrain_labels == "simclr":
        return _Views(model, public, how, generator)
    if how.pretrain_labels == "random":
        public = replace(public, dataset=_Relabelled(public, model, generator))
    return _Labelled(model, loss, public, how.pretrain_batch_size, generator)


class _Labelled:
    """The mean loss of random public examples with labels."""

    more_parameters: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        public: PublicProbe,
        size: int,
        generator: torch.Generator,
    ) -> None:
        self._model, self._loss, self._public = model, loss, public
        self._size, self._generator = size, generator

    def __call__(self) -> Tensor:
        batch = self._public.labelled(self._size, self._generator)
        own = next(self._model.parameters())
        inputs, targets = moved((batch.inputs, batch.targets), own.device)
        args, kwargs = as_call(tree_map(lambda x: _as(x, own.dtype), inputs))
        return self._loss(self._model(*args, **kwargs), targets).mean()


class _Views:
    """SimCLR's loss of random public images; labels are not looked at."""

    def __init__(
        self,
        model: nn.Module,
        public: PublicProbe,
        how: Pretraining,
        generator: torch.Generator,
    ) -> None:
        self._model, self._public = model, public
        self._size, self._generator = how.pretrain_batch_size, generator
        with evaluated(model):
            shown = self._images(1, torch.Generator().manual_seed(0))
            self._contrast = Contrast(model, shown, how.pretrain_temperature)
        self.more_parameters = list(self._contrast.projector.parameters())

    def __call__(self) -> Tensor:
        images = self._images(self._size, self._generator)
        return self._contrast.loss(images, self._generator)

    def _images(self, size: int, generator: torch.Generator) -> Any:
        own = next(self._model.parameters())
        inputs = moved(self._public.inputs(size, generator), own.device)
        return tree_map(lambda x: _as(x, own.dtype), inputs)


class _Relabelled:
    """The inputs of a public dataset, each with a random class that stays its own.

    A net that learns them has to tell the inputs apart; what it finds for that, edges
    and textures, is of use for other labels (Gu et al., section 4).

    Args:
        public: whose dataset.
        model: its outputs ``[B, classes]`` say how many classes there are.
        generator: draws them.
    """

    def __init__(
        self, public: PublicProbe, model: nn.Module, generator: torch.Generator
    ) -> None:
        self._dataset = public.dataset
        own = next(model.parameters())
        inputs = public.inputs(1, torch.Generator().manual_seed(0))
        placed = tree_map(lambda x: _as(x, own.dtype), moved(inputs, own.device))
        args, kwargs = as_call(placed)
        with evaluated(model), torch.no_grad():
            output = model(*args, **kwargs)
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < 2:
            raise ConfigurationError(
                "random labels are classes, and the model does not give one number for "
                "each class",
                "set pretrain_labels = 'own'",
            )
        rows = len(public.dataset)
        classes = torch.randint(output.shape[1], (rows,), generator=generator)
        self._labels = classes.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        example = self._dataset[row]
        pair = isinstance(example, tuple | list) and len(example) in (1, 2)
        return (example[0] if pair else example), self._labels[row]


def _as(x: object, dtype: torch.dtype) -> object:
    is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.to(dtype) if is_float and isinstance(x, torch.Tensor) else x
