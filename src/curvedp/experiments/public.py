"""Public data to probe with or to evaluate on: loaded, and held against the private.

That the data is public is the user's declaration. What can be seen is checked: it is
not the private data itself, it has the same shape, and there is enough of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from curvedp import data as datasets
from curvedp.data import ArrayDataset, DataSource
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments.config import RunConfig
from curvedp.probes import PublicProbe
from curvedp.recipes import Recipe
from curvedp.train.overlap import refuse_private_rows

__all__ = ["public_probe", "public_validation"]


class _Config(Protocol):
    """What a run and a federation say alike of their data."""

    @property
    def data(self) -> str: ...

    @property
    def public_data(self) -> str: ...

    @property
    def public_data_options(self) -> Mapping[str, Any]: ...

    def configured_recipe(self) -> Recipe: ...


def public_probe(config: _Config, private: DataSource) -> PublicProbe | None:
    """The probe of a run's public data; None for a run that takes none.

    Args:
        config: settled, so that paths are full ones.
        private: the data that is trained on.

    Raises:
        ConfigurationError: the recipe and the public data do not belong together.
        DataError: it cannot be read, or does not fit the private data.
    """
    recipe = config.configured_recipe()
    curvature, eigenvalues = recipe.curvature, recipe.eigenvalues
    whitening = curvature is not None and curvature.probe == "public"
    designing = eigenvalues is not None and eigenvalues.spectrum_probe == "public"
    probing = whitening or designing
    if not config.public_data:
        if recipe.pretrains:
            raise ConfigurationError(
                f"the recipe {recipe.name!r} pretrains on public data, and none was "
                "given",
                "give --public-data PATH with data that is declared public",
            )
        if probing:
            raise ConfigurationError(
                "the recipe's probe is 'public', and no public data was given",
                "give --public-data PATH with data that is declared public",
            )
        return None
    if not probing and not recipe.pretrains:
        probe = "takes none" if curvature is None else f"has probe {curvature.probe!r}"
        raise ConfigurationError(
            f"public data was given, and the recipe {recipe.name!r} {probe}",
            "choose a recipe that pretrains (some by --set pretrain_epochs=10), or one "
            "that whitens with --set probe=public, or give no --public-data",
        )
    _refuse_private_data(config.public_data, config)
    public = datasets.load(config.public_data, **dict(config.public_data_options))
    before = recipe.pretraining if recipe.pretrains else None
    own_labels = before is not None and before.pretrain_labels == "own"
    sizes: dict[str, int] = {}
    if before is not None:
        sizes["pretrain_batch_size"] = before.pretrain_batch_size
    if eigenvalues is not None and designing:
        sizes["spectrum_size"] = eigenvalues.spectrum_size
    if curvature is not None and whitening:
        own_labels = own_labels or curvature.labels == "own"
        sizes["probe_size"] = curvature.probe_size
    _check(public, private, own_labels=own_labels, sizes=sizes)
    refuse_private_rows(public.train, private.train, public.name)
    return PublicProbe(public.train, name=Path(config.public_data).name)


def public_validation(config: RunConfig, private: DataSource) -> ArrayDataset:
    """The examples that a run is evaluated on, of data that is declared public.

    Raises:
        ConfigurationError: it is the private data itself.
        DataError: it cannot be read, or does not fit the private data.
    """
    _refuse_private_data(config.validation_data, config)
    public = datasets.load(
        config.validation_data, with_test=False, **config.validation_data_options
    )
    _check_shape(public, private)
    refuse_private_rows(public.train, private.train, public.name)
    if (public.task, public.num_outputs) != (private.task, private.num_outputs):
        raise DataError(
            f"{public.name} is a {public.task.value} of {public.num_outputs} outputs, "
            f"and the private data a {private.task.value} of {private.num_outputs}",
            "declare about the validation data what is declared about the private",
        )
    return public.train


def _refuse_private_data(given: str, config: _Config) -> None:
    if Path(given).resolve() == Path(config.data).resolve():
        raise ConfigurationError(
            f"{given} is the private data itself",
            "give other data, whose people the run need not protect; for research "
            "without a guarantee there is --set probe=oracle",
        )


def _check_shape(public: DataSource, private: DataSource) -> None:
    if public.input_shape != private.input_shape:
        raise DataError(
            f"an input of {public.name} has shape {list(public.input_shape)}, and the "
            f"private data has {list(private.input_shape)}",
            "prepare the public data as the private data was",
        )


def _check(
    public: DataSource, private: DataSource, *, own_labels: bool, sizes: dict[str, int]
) -> None:
    _check_shape(public, private)
    own = (public.task, public.num_outputs) != (private.task, private.num_outputs)
    if own_labels and own:
        raise DataError(
            f"{public.name} is a {public.task.value} of {public.num_outputs} outputs, "
            f"and the private data a {private.task.value} of {private.num_outputs}: "
            "its own labels do not fit the model",
            "use --set labels=model for probes; pretraining needs the same labels, or "
            "none (--set pretrain_labels=simclr)",
        )
    for name, size in sizes.items():
        if len(public.train) < size:
            raise DataError(
                f"{public.name} has {len(public.train)} examples, and a batch takes "
                f"{size}",
                f"use --set {name}={len(public.train)}, or more data",
            )
