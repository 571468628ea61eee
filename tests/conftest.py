"""What all tests share: the nets of ``tests/layers`` are importable from everywhere."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "layers"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Designs of noise are not written to the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _torch_state():
    """Tests draw from torch's global generator; each starts from the same state."""
    torch.manual_seed(0)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == precision
