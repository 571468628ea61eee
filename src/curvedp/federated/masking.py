"""What a client relies on under masks: their strength, and what it refuses."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from curvedp.errors import CurvedpError, RoundError, missing_extra
from curvedp.federated.flower import flwr_part
from curvedp.federated.secure import MODULUS, SumGrid

__all__ = ["CLIENT_PART", "SERVER_PART", "guard", "mask_words", "with_strong_masks"]

#: Modules of Flower that draw masks.
CLIENT_PART = "client.mod.secure_aggregation.secaggplus_mod"
SERVER_PART = "server.workflow.secure_aggregation.secaggplus_workflow"

_CONSTANTS = "common.secure_aggregation.secaggplus_constants"


def mask_words(
    seed: bytes, num_range: int, dimensions_list: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Whole numbers below 2^32 from a seed, uniform, in some shapes.

    In the place of Flower's ``pseudo_rand_gen``, with its arguments.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    except ImportError:
        raise missing_extra("cryptography", "secure") from None
    if num_range != MODULUS:
        raise RoundError(f"masks are drawn modulo {MODULUS}, not {num_range}")
    key = hashlib.sha256(b"curvedp mask" + seed).digest()
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    masks = []
    for shape in dimensions_list:
        count = int(np.prod(shape, dtype=np.int64))
        words = np.frombuffer(stream.update(bytes(4 * count)), dtype="<u4")
        masks.append(words.astype(np.int64).reshape(shape))
    return masks


def with_strong_masks(part: str) -> Any:
    """A module of Flower's protocol that draws its masks with :func:`mask_words`."""
    flwr_part("app")
    module: Any = importlib.import_module(f"flwr.{part}")
    if not hasattr(module, "pseudo_rand_gen"):
        raise CurvedpError(
            "this version of Flower draws its masks in another way",
            "install flwr 1.41, or take another view than secure-aggregate",
        )
    module.pseudo_rand_gen = mask_words
    return module


def guard(message: Any, grid: SumGrid | None) -> None:
    """Refuse what an honest server would not ask in this plan.

    Raises:
        RoundError: it would be hidden less than the plan says.
    """
    constants = flwr_part(_CONSTANTS)
    key, stage = constants.Key, constants.Stage
    asked = message.content.config_records.get(constants.RECORD_KEY_CONFIGS)
    if grid is None or asked is None:
        raise RoundError("the plan is for sums, and this message is not about one")
    now = asked.get(key.STAGE)
    if now == stage.SETUP:
        due = _settings(grid, key)
        differs = [name for name, value in due.items() if asked.get(name) != value]
        least, most = grid.threshold, grid.plan.federation.clients
        sampled, shares = asked.get(key.SAMPLE_NUMBER), asked.get(key.SHARE_NUMBER)
        if differs or sampled != shares or not least <= int(str(sampled)) <= most:
            raise RoundError(
                "the server wants another secure aggregation than the plan's"
            )
    elif now == stage.COLLECT_MASKED_VECTORS:
        _refuse_twice(asked[key.SOURCE_LIST])
        if len(asked[key.SOURCE_LIST]) + 1 < grid.threshold:
            raise RoundError("too few clients would be in the sum")
    elif now == stage.UNMASK:
        active, dead = asked[key.ACTIVE_NODE_ID_LIST], asked[key.DEAD_NODE_ID_LIST]
        _refuse_twice([*active, *dead])
        if len(active) < grid.threshold:
            raise RoundError("too few clients are in the sum")
    elif now == stage.SHARE_KEYS:
        if len(asked) - 1 < grid.threshold:
            raise RoundError("too few clients have sent keys")
    else:
        raise RoundError("the message is of no stage of secure aggregation")


def _settings(grid: SumGrid, key: Any) -> dict[str, Any]:
    return {
        key.THRESHOLD: grid.threshold,
        key.CLIPPING_RANGE: grid.half_range,
        key.TARGET_RANGE: grid.levels,
        key.MOD_RANGE: MODULUS,
        key.MAX_WEIGHT: 1.0,
    }


def _refuse_twice(nodes: Sequence[int]) -> None:
    if len(set(nodes)) != len(nodes):
        raise RoundError("a client is named twice, which would undo its mask")
