"""Crashes are tested on the tiny data set of the experiments' tests."""

from tests.experiments.conftest import blobs

__all__ = ["blobs"]
