r"""Spectra that were found before, in the user's cache folder.

Finding one takes hundreds of products with the Hessian, and depends on neither learning
rate, bands nor epsilon: a search over those would find the same one for every trial. A
spectrum is kept under a hash of what it was found from, with the image of one random
vector beside it. It is used only where the matrix at hand gives that image again: a
loss or a forward pass that changed under the same name is found out by one product.

What is kept is public. A file that cannot be read, or says something impossible, is
found again; several processes that want the same one wait for the first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.curvature.products import Product
from curvedp.curvature.spectrum import CurvatureSpectrum
from curvedp.curvature.tail import Tail
from curvedp.data.files import brief
from curvedp.errors import CurvedpError
from curvedp.locks import in_turn
from curvedp.storage import cache_folder, parse_json, read_regular, write_json
from curvedp.values import is_number, is_whole

__all__ = ["fingerprint", "remembered"]

_log = logging.getLogger(__name__)

#: Part of every name: another number where the same spectrum is found by other means.
VERSION = 1
#: Relative difference of two images of one vector that rounding can make.
SAME = 1e-6
#: Seconds: what is found sooner is not kept.
WORTH_KEEPING = 1.0
#: Bytes of a file, at most, for every eigenvalue and for all else.
_EACH, _REST = 64, 4096


def fingerprint(facts: Any, tensors: Iterable[Tensor]) -> str:
    """A hash of JSON values and tensors, bit by bit."""
    digest = hashlib.sha256(json.dumps([VERSION, facts], sort_keys=True).encode())
    for tensor in tensors:
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def remembered(
    find: Callable[[], CurvatureSpectrum],
    product: Product,
    size: int,
    provenance: Provenance,
    name: str,
    *,
    device: torch.device | str = "cpu",
) -> CurvatureSpectrum:
    """The spectrum of a matrix: from the cache where it is there, found otherwise.

    Args:
        find: searches for it.
        product: with the matrix.
        size: n.
        provenance: of what the matrix was made from; what is not public is not kept.
        name: a :func:`fingerprint` of that.
        device: where ``product`` takes its vectors.
    """
    if not provenance.is_public:
        return find()
    path = cache_folder("spectra") / f"{name}.json"
    with in_turn(path.with_suffix(".lock")):
        random = torch.Generator().manual_seed(size)
        vector = torch.randn(size, dtype=torch.float64, generator=random).to(device)
        image = product(vector)
        # two numbers tell the image: its length, and its part along the vector
        seen = float(image.norm()), float(image @ vector)
        kept = _read(path, seen, size, provenance)
        if kept is not None:
            return kept
        began = time.monotonic()
        found = find()
        if time.monotonic() - began >= WORTH_KEEPING:
            _write(path, seen, found)
        return found


def _write(path: Path, seen: tuple[float, float], found: CurvatureSpectrum) -> None:
    tail = None if found.tail is None else found.tail.to_json()
    try:
        write_json(
            path, {"seen": list(seen), "largest": list(found.largest), "tail": tail}
        )
    except (CurvedpError, OSError, ValueError) as error:  # it is not needed to go on
        _log.info("the spectrum was not cached: %s", error)


def _read(
    path: Path, seen: tuple[float, float], size: int, provenance: Provenance
) -> CurvatureSpectrum | None:
    try:
        if not path.exists():
            return None
        stored = parse_json(read_regular(path, _EACH * size + _REST))
        if not _alike(seen, stored["seen"]):
            raise ValueError("the matrix at hand is another one")
        if not all(map(is_number, stored["largest"])):
            raise ValueError("its eigenvalues are not all numbers")
        largest = tuple(map(float, stored["largest"]))
        if not largest or len(largest) > size or not _falls(largest):
            raise ValueError("its eigenvalues do not descend from a positive number")
        tail = None if stored["tail"] is None else _tail(stored["tail"], size)
        return CurvatureSpectrum(largest, size, tail, provenance)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        _log.warning("the cached spectrum %s is not used: %s", path, brief(error))
        return None


def _alike(seen: tuple[float, float], stored: Sequence[float]) -> bool:
    scale = abs(seen[0])
    return len(stored) == len(seen) and all(
        math.isclose(a, b, rel_tol=SAME, abs_tol=SAME * scale)
        for a, b in zip(seen, stored, strict=True)
    )


def _falls(values: tuple[float, ...]) -> bool:
    return values[0] > 0 and list(values) == sorted(values, reverse=True)


def _tail(stored: dict[str, Any], size: int) -> Tail:
    tail = Tail(**stored)
    numbers = (tail.least, tail.slope, tail.power)
    if not is_whole(tail.count, 1) or tail.count > size:
        raise ValueError(f"its tail ends at {brief(tail.count)} of {size} eigenvalues")
    if not all(is_number(x) and x >= 0 for x in numbers):
        raise ValueError("its tail is not a curve")
    highest = tail.least * math.exp(tail.slope * math.log(tail.count) ** tail.power)
    if not 0 < highest < math.inf:
        raise ValueError("its tail is not a curve of positive numbers")
    return tail
