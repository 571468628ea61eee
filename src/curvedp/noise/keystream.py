"""AES-256 in counter mode, where the counter is an address.

The keystream is the standard one (NIST SP 800-38A): block n is the encryption of the
128-bit number n. That number is split into fields, so each (stream, step, attempt) has
2^48 blocks, 4 PiB, of its own, and nothing has to be remembered to keep them apart::

    stream 8 bits | attempt 32 bits | step 40 bits | block 48 bits

The key is 256 bits from the operating system, made for one object in one process. It is
never stored, and a forked process is refused: it would draw the same keystream.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from curvedp.errors import ConfigurationError, CurvedpError, missing_extra

__all__ = ["Keystream", "Reader", "Words"]

Words = npt.NDArray[np.uint64]

_KEY_BYTES = 32
_BLOCK_BYTES = 16
#: Width of each field of the counter in bits, first to last.
_FIELDS = {"stream": 8, "attempt": 32, "step": 40, "block": 48}


class Reader:
    """Reads the keystream from one counter on; every word is read once.

    Args:
        encryptor: an AES-CTR context.
        blocks: how many blocks there are to the end of the address.
    """

    def __init__(self, encryptor: Any, blocks: int) -> None:
        self._encryptor = encryptor
        self._left = blocks * _BLOCK_BYTES

    def words(self, count: int) -> Words:
        """The next 64-bit words."""
        size = 8 * count
        if size > self._left:
            raise ConfigurationError(
                f"{count} random words are more than one step's keystream has left",
                "a step has 4 PiB; is a shape wrong?",
            )
        self._left -= size
        # some versions want room for one more block
        room = np.empty(size + _BLOCK_BYTES, dtype=np.uint8)
        self._encryptor.update_into(bytes(size), room.data)
        return room[:size].view(np.dtype("<u8"))


class Keystream:
    """Keystreams at addresses, under one secret key.

    Args:
        key: for test vectors; by default from the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise missing_extra("cryptography", "secure") from error
        algorithm = algorithms.AES(os.urandom(_KEY_BYTES) if key is None else key)
        if algorithm.key_size != 8 * _KEY_BYTES:
            raise ConfigurationError("the key of AES-256 has 32 bytes")
        self._encryptor: Callable[[bytes], Any] = lambda counter: Cipher(
            algorithm, modes.CTR(counter)
        ).encryptor()
        self._process = os.getpid()

    def reader(self, stream: int, step: int, attempt: int = 0) -> Reader:
        """The keystream of an address, from its beginning."""
        return self.at(stream=stream, attempt=attempt, step=step, block=0)

    def at(self, **fields: int) -> Reader:
        """The keystream from any block of an address on."""
        if os.getpid() != self._process:
            raise CurvedpError(
                "this process was forked from the one that has the key of the noise; "
                "both would draw the same noise",
                "make a new run object in each process",
            )
        counter = 0
        for name, bits in _FIELDS.items():
            if not 0 <= fields[name] < 1 << bits:
                raise ConfigurationError(
                    f"{name} {fields[name]} is not in the address range of the noise",
                    f"use 0 to {(1 << bits) - 1}",
                )
            counter = counter << bits | fields[name]
        blocks = (1 << _FIELDS["block"]) - fields["block"]
        return Reader(self._encryptor(counter.to_bytes(_BLOCK_BYTES, "big")), blocks)

    def __repr__(self) -> str:
        return "Keystream(AES-256-CTR, key=<secret>)"

    def __getstate__(self) -> NoReturn:
        raise CurvedpError(
            "a keystream holds the secret key of the noise; it cannot be pickled or "
            "copied",
            "make a new one in the other process",
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__getstate__()
