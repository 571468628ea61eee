"""The commands are tested on the tiny run of the experiments' tests."""

import pytest
from typer.testing import CliRunner

from curvedp.cli.app import app
from tests.experiments.conftest import blobs, config

__all__ = ["blobs", "call", "config"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls a command in an empty folder; it has to end with the exit code given."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run
