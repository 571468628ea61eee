"""From a config to data, model and Trainer; everything that can be refused is, here.

Nothing is written and no private step is made before :class:`BuiltRun` is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvedp import data as datasets
from curvedp import models
from curvedp.data import ArrayDataset, DataSource, Task
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments.config import RunConfig
from curvedp.experiments.public import public_probe, public_validation
from curvedp.models.factory import call_factory, is_factory
from curvedp.noise import RandomStreams, Stream
from curvedp.probes import PublicProbe
from curvedp.train import Progress, Trainer

__all__ = [
    "BuiltRun",
    "ModelShape",
    "build_model",
    "build_run",
    "choose_device",
    "default_model",
]

_LOSSES = {
    Task.CLASSIFICATION: "cross-entropy",
    Task.REGRESSION: "mse",
    Task.MULTI_LABEL: "bce",
}


@dataclass(frozen=True)
class ModelShape:
    """What a model has to fit. Declared facts, kept in run.json for later use."""

    input_shape: tuple[int, ...]
    num_outputs: int
    task: Task

    @classmethod
    def of(cls, data: DataSource) -> ModelShape:
        """Of a data set."""
        return cls(data.input_shape, data.num_outputs, data.task)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "input_shape": list(self.input_shape),
            "num_outputs": self.num_outputs,
            "task": self.task.value,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> ModelShape:
        """Read back what :meth:`to_json` wrote."""
        return cls(
            tuple(int(n) for n in stored["input_shape"]),
            int(stored["num_outputs"]),
            datasets.parse_task(stored["task"]),
        )


@dataclass(frozen=True)
class BuiltRun:
    """A run that is ready to start.

    Attributes:
        config: settled (see :meth:`RunConfig.settled`).
        source: the data as loaded.
        train: the private examples that are trained on.
        held_out: what metrics are computed on, or None.
        split: name of the held-out part: "test", "validation", "public validation" or
            "none".
        probe: examples that are declared public, where the recipe asks for them.
        model: initialised, on its device.
        loss: name of the loss.
        metrics: names of the metrics.
    """

    config: RunConfig
    source: DataSource
    train: ArrayDataset
    held_out: ArrayDataset | None
    split: str
    model: nn.Module
    loss: str
    metrics: tuple[str, ...]
    probe: PublicProbe | None = None

    @property
    def planned_steps(self) -> int:
        """Steps that the run makes if nothing stops it."""
        settings = self.config.privacy_settings()
        return settings.sampling(len(self.train)).steps

    def trainer(
        self,
        run_dir: Path | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Trainer:
        """The Trainer of this run."""
        config = self.config
        return Trainer(
            self.model,
            self.loss,
            config.configured_recipe(),
            run_dir=run_dir,
            checkpoint_every=config.checkpoint_every,
            physical_batch_size=config.physical_batch_size,
            seed=config.seed,
            unsafe_reproducible_noise=config.unsafe_reproducible_noise,
            show_private_training_loss=config.show_private_training_loss,
            on_progress=on_progress or (),
            cuda_graph=config.cuda_graph,
            compile=config.compile,
            precision=config.precision or None,
            norm_precision=config.norm_precision or None,
            augment=config.augment or None,
            views=config.views,
            probes=self.probe,
            **{k: v for k, v in config.privacy.items() if v is not None},
        )


def build_run(config: RunConfig, *, to_train: bool = True) -> BuiltRun:
    """Load the data, build and initialise the model, and check them together.

    Args:
        config: of the run.
        to_train: False for evaluation, which needs no public data.

    Raises:
        DataError: the data cannot be read, or does not fit its declaration.
        ConfigurationError: the settings, the model and the data do not fit.
    """
    config = config.settled()
    device = choose_device(config.device)
    # a run that is judged by validation cannot see the test part, not even by mistake
    judged_by_test = config.validation is None and not config.validation_data
    source = datasets.load(config.data, with_test=judged_by_test, **config.data_options)
    train, held_out, split = _parts(config, source)
    probe = public_probe(config, source) if to_train else None
    metrics = _metrics(config, source.task)
    loss = config.loss or _LOSSES[source.task]
    if config.configured_recipe().private:
        config.privacy_settings().plan(config.configured_recipe(), len(train))
    else:
        config.privacy_settings().sampling(len(train))
    model = build_model(config, ModelShape.of(source)).to(device)
    return BuiltRun(config, source, train, held_out, split, model, loss, metrics, probe)


def build_model(config: RunConfig, shape: ModelShape) -> nn.Module:
    """The model, initialised on a stream of its own, with the outputs that it needs."""
    seed = RandomStreams(config.seed).torch_seed(Stream.INITIALISATION)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model = _make_model(config, shape)
    _check_outputs(model, shape)
    return model


def choose_device(name: str) -> torch.device:
    """A device by name; "auto" takes the fastest that is there.

    Raises:
        ConfigurationError: this machine does not have it.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if name not in available:
        raise ConfigurationError(
            f"unknown device {name!r}", "choose one of: auto, cpu, cuda, mps"
        )
    if not available[name]:
        raise ConfigurationError(
            f"this machine has no device {name!r}", "use --device auto or cpu"
        )
    return torch.device(name)


def _parts(
    config: RunConfig, source: DataSource
) -> tuple[ArrayDataset, ArrayDataset | None, str]:
    if config.validation_data:
        return source.train, public_validation(config, source), "public validation"
    if config.validation is None:
        split = "none" if source.test is None else "test"
        return source.train, source.test, split
    seed = RandomStreams(config.seed).torch_seed(Stream.VALIDATION) % 2**32
    train, held_out = datasets.split_validation(
        source.train,
        config.validation,
        seed,
        by_content=config.privacy_settings().hides_size,
    )
    return train, held_out, "validation"


def _metrics(config: RunConfig, task: Task) -> tuple[str, ...]:
    if config.validation_noise is not None:
        if task is Task.REGRESSION:
            raise ConfigurationError(
                "a regression has no right answers, and noise can be added to their "
                "number alone",
                "validate on data that is declared public",
            )
        return ("accuracy",)
    if not config.metrics:
        return ("loss",) if task is Task.REGRESSION else ("accuracy", "loss")
    wrong = [m for m in config.metrics if task is Task.REGRESSION and m != "loss"]
    if wrong:
        raise ConfigurationError(
            f"the metric {wrong[0]!r} is not for a regression", "use --metric loss"
        )
    return config.metrics


def _make_model(config: RunConfig, shape: ModelShape) -> nn.Module:
    name = config.model or default_model(shape.input_shape)
    if not is_factory(name):
        return models.build(
            name, shape.input_shape, shape.num_outputs, **config.model_options
        )
    offered = {"input_shape": shape.input_shape, "num_outputs": shape.num_outputs}
    model = call_factory(name, offered, config.model_options)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{name} gave a {type(model).__name__}, not a torch module"
        )
    return model


def default_model(input_shape: tuple[int, ...]) -> str:
    """A convolution pays from about 16 pixels a side; below, an MLP learns faster."""
    is_large_image = len(input_shape) == 3 and min(input_shape[1:]) >= 16
    return "cnn" if is_large_image else "mlp"


def _check_outputs(model: nn.Module, shape: ModelShape) -> None:
    """One pass over zeros: does the model take these inputs and give these outputs?"""
    if not any(True for _ in model.parameters()):
        raise ConfigurationError(
            "the model has no parameters", "give it a layer to train"
        )
    model.eval()
    try:
        with torch.no_grad():
            output = model(torch.zeros(2, *shape.input_shape))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"the model cannot take inputs of shape {list(shape.input_shape)}: {first}",
            "choose a model for this shape",
        ) from error
    finally:
        model.train()
    if not isinstance(output, Tensor) or not _fits(output, shape):
        given = list(output.shape[1:]) if isinstance(output, Tensor) else type(output)
        raise DataError(
            f"the model gives {given} for one example, and the data needs "
            f"{shape.num_outputs} outputs ({shape.task.value})",
            f"give its last layer {shape.num_outputs} outputs",
        )


def _fits(output: Tensor, shape: ModelShape) -> bool:
    if len(output) != 2:
        return False
    if shape.task is Task.CLASSIFICATION:
        return tuple(output.shape) == (2, shape.num_outputs)
    return math.prod(output.shape[1:]) == shape.num_outputs
