"""The examples run as they stand, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested():
    tested = {"loop.py", "language_model.py"}
    elsewhere = {"demo.py"}
    assert {p.name for p in EXAMPLES.glob("*.py")} <= tested | elsewhere


def test_loop_runs_and_goes_on_where_it_stopped(tmp_path):
    first = run("loop.py", "run", folder=tmp_path)
    assert "(3, 1e-05)-differential privacy" in first
    assert "75 of 75 planned steps" in first
    again = run("loop.py", "run", folder=tmp_path)
    assert "test accuracy" not in again  # nothing was left to do
    assert "75 of 75 planned steps" in again


@pytest.mark.parametrize("script", ["language_model.py"])
def test_example_runs(script, tmp_path):
    assert "Privacy statement" in run(script, folder=tmp_path)
