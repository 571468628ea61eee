"""The 8x8 handwritten digits that come with the package."""

from __future__ import annotations

from importlib import resources

import torch

from curvedp.data.npz import read_npz
from curvedp.data.source import ArrayDataset, DataSource, Task

__all__ = ["load_digits"]

_LEVELS = 16.0


def load_digits(*, with_test: bool = True) -> DataSource:
    """Real handwritten digits: 1437 to train, 360 to test, inputs ``[1, 8, 8]``.

    Pixels are divided by 16, the range that the source declares. The split is a fixed
    permutation and is stored; see digits-LICENCE.txt for source and licence (CC BY
    4.0).

    Args:
        with_test: False leaves the test part unread.
    """
    left_out = () if with_test else ("x_test", "y_test")
    with resources.as_file(resources.files("curvedp.data") / "digits.npz") as path:
        arrays = read_npz(path, leave_out=left_out)

    def part(name: str) -> ArrayDataset:
        pixels = torch.from_numpy(arrays[f"x_{name}"]).unsqueeze(1).float()
        return ArrayDataset(
            pixels.div_(_LEVELS), torch.from_numpy(arrays[f"y_{name}"]).long()
        )

    return DataSource(
        name="digits",
        train=part("train"),
        test=part("test") if with_test else None,
        task=Task.CLASSIFICATION,
        num_outputs=10,
        input_shape=(1, 8, 8),
        facts={
            "format": "embedded",
            "scaling": "pixels / 16",
            "source": "UCI Optical Recognition of Handwritten Digits, "
            "doi:10.24432/C50P49",
            "licence": "CC BY 4.0",
        },
    )
