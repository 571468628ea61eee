"""The commands are tested on the tiny run of the experiments' tests."""

from tests.experiments.conftest import blobs, config

__all__ = ["blobs", "config"]
