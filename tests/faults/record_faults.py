"""Rule 18: what is said holds no private value, and a stored name runs nothing."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import types
import warnings
from pathlib import Path

import torch
from torch.utils.data import Dataset

from curvedp import errors
from curvedp.data import load, table
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments import RunConfig
from curvedp.experiments.runs import _shown_seconds
from curvedp.models import factory
from curvedp.models.factory import call_factory
from curvedp.sampling.watched import WatchedDataset
from tests.hostile.listening import NUMBER, TRACES, unfolded

from .cases import attach, linear, train
from .mutate import Fault, Patch


def _is_silent(call) -> None:
    shown: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            shown += unfolded(error)
    shown += [str(w.message) for w in warned]
    assert shown, "nothing was said"
    assert not any(TRACES.search(text) for text in shown), "a private value is told"


class _Rows(Dataset):
    def __init__(self, act=None):
        self.x, self.act = torch.full((8, 4), NUMBER), act

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        if row and self.act:
            self.act(self.x[row])
        return self.x[row], 0


def _fail(x):
    try:
        raise KeyError(f"bad {x}")
    except KeyError as first:
        raise ValueError(f"bad {x}") from first


def _ours(x):
    try:
        _fail(x)
    except ValueError as first:
        raise DataError("as curvedp words it") from first


_ours.__code__ = _ours.__code__.replace(co_filename=errors.__file__)


def _in_the_loop(act):
    model = linear()

    def act_on_records(_, given):
        if 1e6 < given[0].abs().max() < 1e12:  # synthetic rows are never there
            act(given[0])

    model.register_forward_pre_hook(act_on_records)
    train(attach(_Rows(), model))


def errors_of_the_model_tell_no_record():
    _is_silent(lambda: _in_the_loop(_fail))


def errors_of_ours_are_not_chained_to_it():
    _is_silent(lambda: _in_the_loop(_ours))


def errors_that_look_like_ours_do_not_pass():
    def looks_like_ours(x):
        raise DataError(f"bad {x}")

    _is_silent(lambda: _in_the_loop(looks_like_ours))


def warnings_of_the_model_tell_no_record():
    _is_silent(lambda: _in_the_loop(lambda x: warnings.warn(f"bad {x}", stacklevel=1)))


def errors_in_workers_tell_their_place():
    try:
        train(attach(_Rows(_fail), rate=1.0, loader_options={"num_workers": 1}))
    except errors.CurvedpError as error:
        assert f"{__file__}, line" in error.problem, "it does not say where"
        return
    raise AssertionError("not refused")


def a_header_of_records_is_not_shown():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_text(f"{NUMBER},zqmarker\n" * 2)
        columns = {"a": {"low": 0, "high": 1}}
        _is_silent(lambda: load(path, target="y", classes=["u", "v"], columns=columns))


_CONFIG = RunConfig("digits", model="stored_by_somebody:make")


def a_stored_model_is_not_imported():
    called = []
    module = types.ModuleType("stored_by_somebody")
    module.make = lambda: called.append(1)
    sys.modules["stored_by_somebody"] = module
    try:
        call_factory(RunConfig.from_json(_CONFIG.to_json()).model, {}, {})
    except ConfigurationError:
        pass
    finally:
        del sys.modules["stored_by_somebody"]
    assert not called, "code was run that nobody named"


def a_program_is_not_a_model():
    known = set(sys.modules)
    with contextlib.suppress(ConfigurationError, SystemExit):
        call_factory("PIL.__main__:x", {}, {})
    found = "PIL.__main__" in set(sys.modules) - known
    sys.modules.pop("PIL.__main__", None)
    assert not found, "a program was run"


def seconds_do_not_tell_the_size():
    rate = {"sample_rate": 0.1, "steps": 2, "expected_batch_size": 9}
    config = RunConfig("digits", privacy={"noise_multiplier": 1.0, **rate})
    assert _shown_seconds(config, 1.234) is None


FAULTS = [
    Fault(
        "18 no record in an error of the model's",
        errors_of_the_model_tell_no_record,
        (Patch(errors.withheld.__exit__, "told.__context__ = None", "pass"),),
    ),
    Fault(
        "18 no record in what an error is chained to",
        errors_of_ours_are_not_chained_to_it,
        (
            Patch(
                errors._told,
                "error.__cause__ = error.__context__ = None",
                "pass",
            ),
        ),
    ),
    Fault(
        "18 no record in an error that looks like ours",
        errors_that_look_like_ours_do_not_pass,
        (
            Patch(
                errors._passes,
                "isinstance(error, CurvedpError) and frames[-1].startswith(_OURS)",
                "isinstance(error, CurvedpError)",
            ),
        ),
    ),
    Fault(
        "18 no record in a warning",
        warnings_of_the_model_tell_no_record,
        (
            Patch(
                errors.withheld.__enter__, "warnings.showwarning = self._warn", "pass"
            ),
        ),
    ),
    Fault(
        "18 the place of an error in a worker",
        errors_in_workers_tell_their_place,
        (
            Patch(
                WatchedDataset.__getitems__, 'with withheld("the dataset"):', "if True:"
            ),
        ),
    ),
    Fault(
        "18 no record in a message about a header",
        a_header_of_records_is_not_shown,
        (
            Patch(
                table._refuse_unknown_columns,
                '"correct the declaration or the delimiter;',
                'f"its columns are {header};',
            ),
            # a patched function stands in no file of ours, so its text is withheld
            Patch(errors._passes, "frames[-1].startswith(_OURS)", "True"),
        ),
    ),
    Fault(
        "18 no code of a stored name",
        a_stored_model_is_not_imported,
        (Patch(factory.call_factory, "isinstance(name, StoredName)", "False"),),
    ),
    Fault(
        "18 no code of a program",
        a_program_is_not_a_model,
        (
            Patch(
                factory._import_factory,
                '(root in _NO_FACTORIES and not is_loaded) or ".__" in',
                "False and",
            ),
        ),
    ),
    Fault(
        "18 no size in a stored time",
        seconds_do_not_tell_the_size,
        (Patch(_shown_seconds, "config.privacy_settings().hides_size", "False"),),
    ),
]
