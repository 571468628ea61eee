import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from curvedp.data import FORMATS, load
from curvedp.errors import ConfigurationError, DataError


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(DataError, match=r"no such file or folder[\s\S]*'digits'"):
        load(tmp_path / "absent")
    with pytest.raises(DataError, match="no such file or folder"):
        load("mnist-that-is-not-here")


def test_a_path_object_is_never_a_built_in_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        load(Path("digits"))


@pytest.mark.parametrize("name", ["data.pkl", "data.pickle", "model.pt", "data.pth"])
def test_pickles_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps([1]))
    with pytest.raises(DataError, match="a pickle runs code"):
        load(tmp_path / name)


def test_an_unknown_suffix_asks_for_the_format(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="pass format="):
        load(path)
    with pytest.raises(ConfigurationError, match="unknown data format 'parquet'"):
        load(path, format="parquet")


@pytest.mark.parametrize("name", FORMATS)
def test_folders_and_files_are_not_confused(tmp_path, name):
    path = tmp_path / "thing"
    if name in ("npz", "table"):
        path.mkdir()
    else:
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"needs a (file|folder)"):
        load(path, format=name)


def test_unknown_options_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'digits' has no option 'size'"):
        load("digits", size=4)
    with pytest.raises(ConfigurationError, match="its options: channels, classes"):
        load(tmp_path, labels="fine")


def test_only_torch_numpy_and_the_standard_library_are_imported():
    code = (
        "import sys; from curvedp.data import load; import curvedp.models; "
        "load('digits'); "
        "print([m for m in ('PIL', 'sklearn', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "[]"
