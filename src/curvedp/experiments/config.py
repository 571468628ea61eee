"""What a run is made of, as one frozen value that TOML, flags and run.json share.

In a config file::

    data = "digits"                 # or a table: [data] source = "adult.csv", ...
    model = "cnn"                   # or: [model] name = "cnn", width = 16
    recipe = "dp-sgd"               # or: [recipe] name = "dp-kfc", damping = 0.1
    public_data = "other.npz"       # or: [public_data] source = "other.npz", ...
    validation_data = "held.npz"    # declared public; metrics are computed on it

    [privacy]
    epsilon = 3.0
    delta = 1e-5
    batch_size = 256
    epochs = 20

    [run]
    seed = 0
    device = "cpu"
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError
from curvedp.models.factory import StoredName, is_factory
from curvedp.recipes import Recipe, get_recipe
from curvedp.train.fitting import AUTO
from curvedp.train.losses import LOSSES
from curvedp.train.metrics import METRICS
from curvedp.train.settings import PrivacySettings

__all__ = ["DEFAULT_BATCH_SIZE", "DEFAULT_EPOCHS", "NOT_PRIVATE", "RunConfig"]

#: How every output labels what has no guarantee.
NOT_PRIVATE = "NOT PRIVATE"

#: What is taken where a run does not declare its sampling (by rate) itself.
DEFAULT_BATCH_SIZE, DEFAULT_EPOCHS = 256, 20

#: The data set that comes with the package.
BUILT_IN_DATA = "digits"

#: Tables that a config file may have, and the key that names the thing itself.
_NAMED_TABLES = {
    "data": "source",
    "model": "name",
    "recipe": "name",
    "public_data": "source",
    "validation_data": "source",
}
_PRIVACY_TYPES: dict[str, tuple[type, ...]] = {
    "epsilon": (float, int),
    "noise_multiplier": (float, int),
    "delta": (float, int),
    "batch_size": (int,),
    "epochs": (int,),
    "sample_rate": (float, int),
    "steps": (int,),
    "expected_batch_size": (float, int),
    "relation": (str,),
    "accountant": (str,),
    "allow_large_delta": (bool,),
    "secure": (bool,),
    "independent_process": (bool,),
}
_BY_RATE = ("sample_rate", "steps", "expected_batch_size")
_RUN_TYPES: dict[str, tuple[type, ...]] = {
    "physical_batch_size": (int, str),
    "seed": (int,),
    "unsafe_reproducible_noise": (int,),
    "device": (str,),
    "augment": (str,),
    "views": (int,),
    "cuda_graph": (bool,),
    "compile": (bool,),
    "precision": (str,),
    "norm_precision": (str,),
    "metrics": (list, tuple),
    "checkpoint_every": (int,),
    "validation": (float, int),
    "validation_is_public": (bool,),
    "validation_noise": (float, int),
    "loss": (str,),
    "show_private_training_loss": (bool,),
}
_DEEPEST = 8
_WORDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. Public: it holds no data and no secret.

    Attributes:
        data: built-in name, file or folder.
        data_options: what is declared about the data.
        model: built-in name or ``module:factory``; empty chooses by the input's shape.
        model_options: of the model.
        recipe: name of the method.
        recipe_settings: what differs from the recipe's defaults.
        public_data: built-in name, file or folder that is declared public, for a recipe
            that probes with public data; empty for none.
        public_data_options: what is declared about it.
        privacy: fields of :class:`curvedp.train.settings.PrivacySettings`.
        physical_batch_size: rows that are computed at once; bounds memory. "auto" takes
            what fits.
        seed: of the public random streams: initialisation, dropout, validation split.
        unsafe_reproducible_noise: for tests; there is no guarantee then.
        augment: name of an augmentation of images; empty for none.
        views: random views of an example that are averaged before clipping.
        device: "auto", "cpu", "cuda" or "mps".
        cuda_graph: record each pass as a CUDA graph; the numbers are the same.
        compile: compile each pass; the numbers are the same up to rounding.
        precision: "bf16" for a forward pass in bfloat16, "bf16-kept" to keep in it
            what waits for the backward pass; empty for the model's own.
        norm_precision: "float32" or "bf16" for norms in less than float64; empty for
            the best that the device is not much slower at.
        metrics: what is computed on held-out examples; empty chooses by the task.
        checkpoint_every: steps between checkpoints.
        validation: share of the training examples that is set apart for evaluation. A
            run that has one never opens the test part.
        validation_is_public: the user's word that nobody in that share needs to be
            protected from the metrics.
        validation_noise: standard deviation of the noise on the number of right answers
            there, so that the accuracy is a release that is paid for.
        validation_data: built-in name, file or folder that is declared public, for
            evaluation; empty for none. The test part is then not opened either.
        validation_data_options: what is declared about it.
        loss: name of a loss; empty chooses by the task.
        show_private_training_loss: show a private quantity; the ledger notes it.
    """

    data: str
    data_options: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = "dp-sgd"
    recipe_settings: Mapping[str, Any] = field(default_factory=dict)
    public_data: str = ""
    public_data_options: Mapping[str, Any] = field(default_factory=dict)
    validation_data: str = ""
    validation_data_options: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    physical_batch_size: int | str | None = None
    seed: int | None = None
    unsafe_reproducible_noise: int | None = None
    augment: str = ""
    views: int = 1
    device: str = "auto"
    cuda_graph: bool = False
    compile: bool = False
    precision: str = ""
    norm_precision: str = ""
    metrics: tuple[str, ...] = ()
    checkpoint_every: int = 20
    validation: float | None = None
    validation_is_public: bool = False
    validation_noise: float | None = None
    loss: str = ""
    show_private_training_loss: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.data, str) or not self.data:
            raise ConfigurationError(
                "the run names no data", "give --data digits, a file or a folder"
            )
        for name in ("model", "recipe", "public_data", "validation_data"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}", "give a name as text"
                )
        for name in (*_OPTIONS.values(), "privacy"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigurationError(f"{name} is no table", "give names and values")
        for item in fields(self):
            _refuse_absurd(item.name, getattr(self, item.name))
        _check_types("privacy", self.privacy, _PRIVACY_TYPES)
        _check_types("run", self._run_settings(), _RUN_TYPES)
        self.configured_recipe()
        _one_of("metric", self.metrics, [*METRICS, "loss"])
        _one_of("loss", [self.loss] if self.loss else [], LOSSES)
        _one_of("device", [self.device], ["auto", "cpu", "cuda", "mps"])
        if self.physical_batch_size not in (None, AUTO):
            _check_types(
                "run",
                {"physical_batch_size": self.physical_batch_size},
                {"physical_batch_size": (int,)},
            )
        if self.checkpoint_every < 1:
            raise ConfigurationError(
                f"checkpoint_every is {self.checkpoint_every}", "use 1 or more"
            )
        for name in ("seed", "unsafe_reproducible_noise"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(f"{name} is {value}", "use 0 or more")
        for options in (self.data_options, self.validation_data_options):
            if "with_test" in options:
                raise ConfigurationError(
                    "data has no option 'with_test'",
                    "whether the test part is read follows from --validation",
                )
        self._check_validation()

    def _check_validation(self) -> None:
        if self.validation is not None and self.validation_data:
            raise ConfigurationError(
                "there are two kinds of validation: a share of the training data, and "
                "data of its own",
                "give --validation or --validation-data",
            )
        for name in ("validation_is_public", "validation_noise"):
            given = getattr(self, name) not in (False, None)
            if given and self.validation is None:
                raise ConfigurationError(
                    f"{name} is given without a share of the data to validate on",
                    "give --validation 0.2 as well",
                )
        if self.validation_noise is None:
            return
        if self.validation_is_public or not self.validation_noise > 0:
            raise ConfigurationError(
                f"validation_noise is {self.validation_noise}",
                "give a positive number, and do not declare the share public beside it",
            )
        if self.metrics not in ((), ("accuracy",)):
            raise ConfigurationError(
                f"the metrics are {', '.join(self.metrics)}, and noise can be added to "
                "the number of right answers alone",
                "use --metric accuracy",
            )

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any]) -> RunConfig:
        """Read a config, such as a TOML file; an unknown key is refused by name."""
        known = [*_NAMED_TABLES, "privacy", "run"]
        _refuse_unknown("the config", table, known)
        given: dict[str, Any] = {}
        for name, key in _NAMED_TABLES.items():
            thing = table.get(name)
            if isinstance(thing, Mapping):
                options = dict(thing)
                given[name] = options.pop(key, "" if name == "model" else None)
                _refuse_nameless(name, key, given[name])
                given[_OPTIONS[name]] = options
            elif isinstance(thing, str):
                given[name] = thing
            elif thing is not None:
                raise ConfigurationError(
                    f"{name} is {thing!r}", f"give a name, or a table [{name}]"
                )
        for name in ("privacy", "run"):
            if not isinstance(table.get(name, {}), Mapping):
                raise ConfigurationError(f"{name} is not a table", f"use [{name}]")
        given["privacy"] = dict(table.get("privacy", {}))
        run = dict(table.get("run", {}))
        _refuse_unknown("[run]", run, list(_RUN_TYPES))
        if isinstance(run.get("metrics"), str):
            run["metrics"] = [run["metrics"]]
        if isinstance(run.get("metrics"), list):
            run["metrics"] = tuple(run["metrics"])
        given = {k: v for k, v in {**given, **run}.items() if v is not None}
        return cls(**{"data": "", **given})

    def to_json(self) -> dict[str, Any]:
        """The config as JSON values; :meth:`from_json` reads it back."""
        return {**asdict(self), "metrics": list(self.metrics)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> RunConfig:
        """Read what :meth:`to_json` wrote; a model to import has to be repeated."""
        _refuse_unknown("the stored run", stored, [f.name for f in fields(cls)])
        metrics = stored.get("metrics", [])
        given = tuple(metrics) if isinstance(metrics, list) else metrics
        read = cls(**{**stored, "metrics": given})
        if is_factory(read.model):
            return replace(read, model=StoredName(read.model))
        return read

    @property
    def said_model(self) -> str | None:
        """The model's name if the user has said it, for a run of the same config."""
        return None if isinstance(self.model, StoredName) else self.model

    def repeating(self, model: str | None) -> RunConfig:
        """The same, with the name of its model said again by the user, if it is.

        Raises:
            ConfigurationError: another name was said.
        """
        if model is None:
            return self
        if model != self.model:
            raise ConfigurationError(
                f"the stored model is {str(self.model)!r}, not {model!r}",
                "repeat the stored name, or leave --model out",
            )
        return replace(self, model=str(model))

    def settled(self) -> RunConfig:
        """With every default that must not change later: seed, sampling, full paths."""
        privacy = {k: v for k, v in self.privacy.items() if v is not None}
        if not any(name in privacy for name in _BY_RATE):
            sizes = {"batch_size": DEFAULT_BATCH_SIZE, "epochs": DEFAULT_EPOCHS}
            privacy = {**sizes, **privacy}
        return replace(
            self,
            data=_settled_source(self.data),
            data_options=_settled_options(self.data_options),
            public_data=_settled_source(self.public_data),
            public_data_options=_settled_options(self.public_data_options),
            validation_data=_settled_source(self.validation_data),
            validation_data_options=_settled_options(self.validation_data_options),
            privacy=privacy,
            # JSON numbers beyond 2^53 are not safe everywhere
            seed=secrets.randbits(31) if self.seed is None else self.seed,
        )

    def configured_recipe(self) -> Recipe:
        """The recipe with this run's settings."""
        settings = dict(self.recipe_settings)
        recipe = get_recipe(self.recipe)
        if self.public_data and recipe.probes:
            settings.setdefault("probe", "public")  # what else would it be for
        if self.public_data and recipe.eigenvalues is not None:
            settings.setdefault("spectrum_probe", "public")
        return recipe.configure(**settings)

    @property
    def private(self) -> bool:
        """Whether there is a guarantee: a private recipe, secret noise, no oracle."""
        recipe = self.configured_recipe()
        secret = self.unsafe_reproducible_noise is None
        return recipe.private and not recipe.oracle and secret

    def privacy_settings(self) -> PrivacySettings:
        """The privacy settings as the library takes them."""
        return PrivacySettings.of(dict(self.privacy))

    def on(self, device: str) -> RunConfig:
        """The same run on another device, which may have no graphs."""
        graphs = self.cuda_graph and device in ("auto", "cuda")
        return replace(self, device=device, cuda_graph=graphs)

    def _run_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _RUN_TYPES}


_OPTIONS = {
    "data": "data_options",
    "model": "model_options",
    "recipe": "recipe_settings",
    "public_data": "public_data_options",
    "validation_data": "validation_data_options",
}


def _refuse_nameless(name: str, key: str, value: Any) -> None:
    optional = name in ("public_data", "validation_data")
    if optional and not (isinstance(value, str) and value):
        raise ConfigurationError(
            f"[{name}] has no {key}", f'give {key} = "..." or leave the table out'
        )


def _settled_source(name: str) -> str:
    return name if name in ("", BUILT_IN_DATA) else _full_path(name)


def _settled_options(options: Mapping[str, Any]) -> dict[str, Any]:
    settled = dict(options)
    if isinstance(settled.get("test"), str | Path):
        settled["test"] = _full_path(str(settled["test"]))
    return settled


def _full_path(text: str) -> str:
    path = Path(text).expanduser()
    # what is not there is named in the error as the user wrote it
    return str(path.absolute()) if path.exists() else text


def _refuse_unknown(where: str, table: Mapping[str, Any], known: list[str]) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ConfigurationError(
            f"{where} has the unknown key {', '.join(map(repr, unknown))}",
            f"known keys: {', '.join(known)}",
        )


def _check_types(
    where: str, table: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]
) -> None:
    _refuse_unknown(f"[{where}]", table, list(types))
    for name, value in table.items():
        wanted = types[name]
        if value is None:
            continue
        if not isinstance(value, wanted) or (
            isinstance(value, bool) and bool not in wanted
        ):
            raise ConfigurationError(
                f"{name} is {value!r}", f"use {_WORDS.get(wanted[0], 'a list')}"
            )


def _refuse_absurd(name: str, value: Any, depth: int = 0) -> None:
    """Refuse numbers that no setting has, and tables within tables within tables."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigurationError(f"{name} is a number of 64 bits or more", "use less")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{name} has the value {value}", "use a finite number")
    if depth > _DEEPEST:
        raise ConfigurationError(f"{name} is nested too deeply", "use plain values")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_absurd(f"{name}.{str(key)[:40]}", item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_absurd(name, item, depth + 1)


def _one_of(what: str, names: Any, known: Any) -> None:
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"unknown {what} {name!r}", f"choose from: {', '.join(known)}"
            )
