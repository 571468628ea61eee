"""The settings of a run as options, and how they join a config file (options win)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from curvedp.cli.parameters import extend_signature
from curvedp.errors import ConfigurationError, DataError

__all__ = ["parse_pairs", "read_value", "takes_run_settings"]

_LONGEST_CONFIG = 1 << 20
_WHAT, _PRIVACY, _SAMPLING = "Data and model", "Privacy", "Sampling"
_RUN, _UNSAFE = "Run", "Against privacy"


def _option(panel: str, text: str, *names: str, shown: str | bool = True) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=shown)


#: name in the command's signature -> annotation
_OPTIONS: dict[str, Any] = {
    "config": Annotated[
        Path | None, _option(_WHAT, "TOML file with these settings; options win.")
    ],
    "data": Annotated[
        str | None,
        _option(_WHAT, "digits, or a file or folder (IDX, CIFAR, images, npz, CSV)."),
    ],
    "data_option": Annotated[
        list[str] | None,
        _option(
            _WHAT,
            "KEY=VALUE declared about the data, e.g. num_classes=10.",
            "-D",
            "--data-option",
        ),
    ],
    "model": Annotated[
        str | None,
        _option(
            _WHAT, "Built-in name or module:factory.", shown="cnn from 16x16, else mlp"
        ),
    ],
    "model_option": Annotated[
        list[str] | None,
        _option(
            _WHAT, "KEY=VALUE of the model, e.g. width=32.", "-M", "--model-option"
        ),
    ],
    "public_data": Annotated[
        str | None,
        _option(
            _WHAT, "Data declared public, to probe a recipe that whitens (as --data)."
        ),
    ],
    "public_option": Annotated[
        list[str] | None,
        _option(
            _WHAT,
            "KEY=VALUE declared about the public data.",
            "-P",
            "--public-option",
        ),
    ],
    "validation_data": Annotated[
        str | None,
        _option(_WHAT, "Data declared public, to evaluate on (as --data)."),
    ],
    "validation_option": Annotated[
        list[str] | None,
        _option(
            _WHAT,
            "KEY=VALUE declared about the validation data.",
            "-V",
            "--validation-option",
        ),
    ],
    "epsilon": Annotated[
        float | None, _option(_PRIVACY, "Privacy budget; calibrates the noise.")
    ],
    "noise_multiplier": Annotated[
        float | None, _option(_PRIVACY, "Noise / clip bound, in place of epsilon.")
    ],
    "delta": Annotated[float | None, _option(_PRIVACY, "Below 1/size.", shown="1e-5")],
    "relation": Annotated[
        str | None,
        _option(
            _PRIVACY,
            "add-remove, zero-out or replace-one.",
            shown="by the sampling: zero-out by size, add-remove by rate",
        ),
    ],
    "accountant": Annotated[str | None, _option(_PRIVACY, "pld or rdp.", shown="pld")],
    "secure": Annotated[
        bool,
        _option(
            _PRIVACY,
            "AES-256-CTR noise on a grid; needs curvedp[secure].",
            "--secure-noise",
            shown=False,
        ),
    ],
    "independent_process": Annotated[
        bool,
        _option(
            _PRIVACY,
            "One of several runs of a launcher, whose epsilons add up.",
            "--independent-process",
            shown=False,
        ),
    ],
    "batch_size": Annotated[
        int | None,
        _option(_SAMPLING, "With --epochs; the size is then public.", shown="256"),
    ],
    "epochs": Annotated[
        int | None, _option(_SAMPLING, "With --batch-size.", shown="20")
    ],
    "sample_rate": Annotated[
        float | None,
        _option(_SAMPLING, "With the next two; the size stays private."),
    ],
    "steps": Annotated[int | None, _option(_SAMPLING, "Number of steps.")],
    "expected_batch_size": Annotated[
        float | None, _option(_SAMPLING, "Divisor of the noisy sum.")
    ],
    "physical_batch_size": Annotated[
        str | None,
        _option(_RUN, "Rows computed at once; bounds memory. auto: what fits."),
    ],
    "augment": Annotated[
        str | None,
        _option(_RUN, "Views of images: flips, crops, flips-and-crops.", shown="none"),
    ],
    "views": Annotated[
        int | None,
        _option(_RUN, "Views of an example, averaged before clipping.", shown="1"),
    ],
    "metric": Annotated[
        list[str] | None,
        _option(_RUN, "accuracy, auc, f1, loss; repeatable.", shown="by the task"),
    ],
    "validation": Annotated[
        float | None,
        _option(_RUN, "Share of the training data to evaluate on, not the test split."),
    ],
    "validation_is_public": Annotated[
        bool,
        _option(
            _RUN,
            "Declare that nobody in that share needs protection.",
            "--validation-is-public",
            shown=False,
        ),
    ],
    "loss": Annotated[
        str | None,
        _option(_RUN, "cross-entropy, mse, bce.", shown="by the task"),
    ],
    "seed": Annotated[
        int | None, _option(_RUN, "Of initialisation and dropout, not of noise.")
    ],
    "checkpoint_every": Annotated[
        int | None, _option(_RUN, "Steps between checkpoints.", shown="20")
    ],
    "device": Annotated[
        str | None, _option(_RUN, "auto, cpu, cuda or mps.", shown="auto")
    ],
    "cuda_graph": Annotated[
        bool,
        _option(
            _RUN,
            "Record each pass as a CUDA graph: faster for small nets, same numbers.",
            "--cuda-graph",
            shown=False,
        ),
    ],
    "compile": Annotated[
        bool,
        _option(
            _RUN,
            "Compile each pass: same numbers up to rounding, first step takes minutes.",
            "--compile",
            shown=False,
        ),
    ],
    "precision": Annotated[
        str | None,
        _option(
            _RUN,
            "bf16: forward pass in bfloat16; bf16-kept: float32, kept in bfloat16.",
            shown="the model's own",
        ),
    ],
    "norm_precision": Annotated[
        str | None,
        _option(_RUN, "Of norms: wide, float32 or bf16; same bound.", shown="wide"),
    ],
    "allow_large_delta": Annotated[
        bool,
        _option(
            _UNSAFE,
            "Accept a delta of 1/size or more.",
            "--allow-large-delta",
            shown=False,
        ),
    ],
    "show_private_training_loss": Annotated[
        bool,
        _option(
            _UNSAFE,
            "Shown while training; noted in the ledger.",
            "--show-private-training-loss",
            shown=False,
        ),
    ],
    "unsafe_reproducible_noise": Annotated[
        int | None, _option(_UNSAFE, "Seed of the noise, for tests: NO guarantee.")
    ],
}

_PRIVACY_KEYS = (
    "epsilon", "noise_multiplier", "delta", "relation", "accountant",
    "allow_large_delta", "batch_size", "epochs", "sample_rate", "steps",
    "expected_batch_size", "secure", "independent_process",
)  # fmt: skip
_RUN_KEYS = (
    "physical_batch_size", "validation", "validation_is_public", "loss", "seed",
    "checkpoint_every", "device", "cuda_graph", "compile", "precision",
    "norm_precision",    "augment", "views",
    "show_private_training_loss", "unsafe_reproducible_noise",
)  # fmt: skip
#: Table in the file, the key that names the thing, and the option for its details.
_NAMED = (
    ("data", "source", "data_option"),
    ("model", "name", "model_option"),
    ("public_data", "source", "public_option"),
    ("validation_data", "source", "validation_option"),
)
#: Settings that are text whatever they look like, such as a layer named 0.
_TEXTS = ("leave_out",)
#: Ways to say the same thing; an option drops what the file says in the other way.
_RIVALS = (
    (("epsilon",), ("noise_multiplier",)),
    (("batch_size", "epochs"), ("sample_rate", "steps", "expected_batch_size")),
)


def takes_run_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command with all settings of a run; it gets them as ``settings``, a table."""

    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> None:
        given = {name: kwargs.pop(name, None) for name in _OPTIONS}
        command(settings=_settings(given), **kwargs)

    return extend_signature(wrapped, command, _OPTIONS, drop=("settings",))


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """The config file's table with the given options put into it."""
    table = {} if given["config"] is None else _read_toml(given["config"])
    for name, key, option in _NAMED:
        options = parse_pairs(given[option] or [], f"--{option.replace('_', '-')}")
        if given[name] is not None or options:
            table[name] = _overlaid(table.get(name), key, given[name], options)
    privacy = _subtable(table, "privacy")
    chosen = {k: given[k] for k in _PRIVACY_KEYS if _is_given(given[k])}
    for one, other in _RIVALS:
        for mine, theirs in ((one, other), (other, one)):
            if any(k in chosen for k in mine) and not any(k in chosen for k in theirs):
                privacy = {k: v for k, v in privacy.items() if k not in theirs}
    table["privacy"] = {**privacy, **chosen}
    run = {k: given[k] for k in _RUN_KEYS if _is_given(given[k])}
    if "physical_batch_size" in run:
        run["physical_batch_size"] = read_value(run["physical_batch_size"])
    if given["metric"]:
        run["metrics"] = [m for text in given["metric"] for m in text.split(",")]
    table["run"] = {**_subtable(table, "run"), **run}
    return table


def _is_given(value: Any) -> bool:
    return value is not None and value is not False  # 0 is given, and may be refused


def _overlaid(
    stored: Any, key: str, name: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    table = dict(stored) if isinstance(stored, Mapping) else {}
    if isinstance(stored, str):
        table[key] = stored
    if name is not None:
        if name != table.get(key):
            table = {}  # the file's options are of another model or data set
        table[key] = name
    return {**table, **options}


def _subtable(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is not a table", f"write it as [{name}]")
    return dict(value)


def parse_pairs(pairs: list[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE`` texts as a table; values are read as TOML, else as text."""
    table: dict[str, Any] = {}
    for pair in pairs:
        key, mark, text = pair.partition("=")
        if not mark or not key:
            raise ConfigurationError(f"{option} {pair!r}", "write KEY=VALUE")
        if key.rpartition(".")[2] in _TEXTS:
            table[key] = text
            continue
        table[key] = read_value(text)
    return table


def read_value(text: str) -> Any:
    """A value as TOML reads it; what is none is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise ConfigurationError(
            f"the value {text[:40]}... cannot be read", "write a plain value"
        ) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # a pipe is welcome, one without an end is not
            content = file.read(_LONGEST_CONFIG + 1)
        if len(content) > _LONGEST_CONFIG:
            raise ConfigurationError(
                f"{path} is longer than {_LONGEST_CONFIG} bytes", "give a config file"
            )
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"cannot read the config {path}: {reason}", "give the path of a TOML file"
        ) from error
    except ConfigurationError:
        raise
    except RecursionError as error:
        raise ConfigurationError(
            f"{path} is nested too deeply", "see `curvedp train --help`"
        ) from error
    except ValueError as error:  # also of TOML and of UTF-8
        first = (str(error).splitlines() or [""])[0][:200]
        raise ConfigurationError(
            f"{path} is not a TOML file: {first}", "see `curvedp train --help`"
        ) from error
