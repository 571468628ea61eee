"""Image files in one folder per class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from curvedp.data.source import ArrayDataset, DataSource, Task
from curvedp.errors import ConfigurationError, DataError, missing_extra
from curvedp.values import is_whole

__all__ = ["load_image_folder"]

_PIXEL_LEVELS = 255.0
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
# Named, because pillow would otherwise try every decoder by content, and some of those
# start other programs (EPS calls Ghostscript).
_DECODERS = ("PNG", "JPEG", "BMP", "PPM", "WEBP")
_MODES = {1: "L", 3: "RGB"}


def load_image_folder(
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    image_size: int | Sequence[int] | None = None,
    channels: int = 3,
    with_test: bool = True,
) -> DataSource:
    """Load ``train/<class>/*.png`` and ``test/<class>/*.png``, or ``<class>/*.png``.

    Every image is scaled to the same declared size by itself, and pixels are divided by
    255.

    Args:
        folder: The root.
        classes: The class folders in the order of their labels. Declared, because a
            class that only one record has would otherwise show in the model's shape.
        image_size: Side, or height and width, of the inputs.
        channels: 3 for colour, 1 for grey.
        with_test: False leaves ``test`` alone.

    Raises:
        DataError: If something is undeclared, or a folder or an image is not usable.
    """
    if not classes or not isinstance(classes, list | tuple):
        raise DataError(
            f"{folder}: the classes are not declared; a list taken from the folders "
            "of private data is a release",
            'declare classes=["cat", "dog"], the names of the class folders',
        )
    if image_size is None:
        raise DataError(
            f"{folder}: the image size is not declared",
            "declare image_size=32, or image_size=[height, width]",
        )
    names = [str(name) for name in classes]
    if len(set(names)) != len(names):
        raise DataError(
            f"{folder}: a class is listed twice: {names}", "list every folder once"
        )
    for name in names:
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise DataError(
                f"{folder}: {name!r} is not the name of a folder in it",
                "a class is named by its folder alone, without a path",
            )
    if not isinstance(channels, int) or channels not in _MODES:
        raise ConfigurationError(f"channels is {channels}", "1 is grey, 3 is colour")
    height, width = _parse_size(image_size)
    shape = (channels, height, width)
    has_parts = (folder / "train").is_dir() and "train" not in names
    train = _load_part(folder / "train" if has_parts else folder, names, shape)
    test_folder = folder / "test"
    test = None
    if with_test and has_parts and test_folder.is_dir():
        test = _load_part(test_folder, names, shape)
    return DataSource(
        name=folder.name,
        train=train,
        test=test,
        task=Task.CLASSIFICATION,
        num_outputs=len(names),
        input_shape=shape,
        facts={"format": "image folders", "scaling": "pixels / 255"},
    )


def _parse_size(image_size: int | Sequence[int]) -> tuple[int, int]:
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    if (
        not isinstance(sides, list | tuple)
        or len(sides) != 2
        or not all(is_whole(side, 1) and side <= 4096 for side in sides)
    ):
        raise ConfigurationError(
            f"image_size is {image_size!r}", "use one side or two, from 1 to 4096"
        )
    return sides[0], sides[1]


def _load_part(
    folder: Path, names: list[str], shape: tuple[int, int, int]
) -> ArrayDataset:
    if any(
        entry.is_dir() and entry.name not in names and entry.name[0] != "."
        for entry in folder.iterdir()
    ):
        raise DataError(
            f"{folder}: a folder in it is none of the declared classes",
            f"declared are {', '.join(names)}; declare the other one, or move it away",
        )
    files = [
        (path, label, f"{folder / name}: image {place} in the order of names")
        for label, name in enumerate(names)
        for place, path in enumerate(_images_of(folder / name), start=1)
    ]
    if not files:
        raise DataError(
            f"{folder}: no images in the class folders {names}",
            f"images end in {', '.join(_SUFFIXES)}",
        )
    pixels = torch.empty((len(files), *shape), dtype=torch.uint8)
    for place, (path, _, called) in enumerate(files):
        pixels[place] = torch.from_numpy(_read_image(path, called, shape))
    labels = torch.tensor([label for _, label, _ in files])
    return ArrayDataset(pixels.float().div_(_PIXEL_LEVELS), labels)


def _images_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in _SUFFIXES)


def _read_image(path: Path, called: str, shape: tuple[int, int, int]) -> np.ndarray:
    """One image; errors call it by its place, as its name may be a person's."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "images") from error
    channels, height, width = shape
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what metadata say, which is private
            # pillow only warns of a small file that unpacks to a huge image.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_DECODERS) as image:
                fitted = image.convert(_MODES[channels]).resize(
                    (width, height), Image.Resampling.BILINEAR
                )
    except (
        OSError,
        SyntaxError,  # pillow's word for a broken PNG
        ValueError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise DataError(
            f"{called}: cannot be read as an image ({type(error).__name__})",
            "remove or replace the file",
        ) from error
    array = np.array(fitted, dtype=np.uint8)
    return array.reshape(height, width, channels).transpose(2, 0, 1).copy()
