"""Hashed bags of words, from documents of random words.

A :class:`Hashing` says how the *user* turns text into numbers. The probe sends its
documents through the same one, so that collisions, signs and scale are right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.probes.checks import check_draw, check_lengths
from curvedp.probes.laws import RankLaw, draw_categories
from curvedp.probes.tokens import draw_lengths, mask_of
from curvedp.values import is_whole

__all__ = ["HashedDocumentProbe", "Hashing", "murmur3"]


def murmur3(word: str) -> int:
    """MurmurHash3 (x86, 32 bits, seed 0) of the word in UTF-8, as a signed number.

    The hash of scikit-learn's ``HashingVectorizer`` and ``FeatureHasher``.
    """
    data = word.encode("utf-8")
    h = 0
    whole = len(data) - len(data) % 4
    for start in range(0, whole, 4):
        h ^= _scrambled(int.from_bytes(data[start : start + 4], "little"))
        h = _rotated(h, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    if whole < len(data):
        h ^= _scrambled(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    h ^= h >> 16
    return h - 2**32 if h >= 2**31 else h


def _scrambled(k: int) -> int:
    return _rotated(k * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & 0xFFFFFFFF


@dataclass(frozen=True)
class Hashing:
    """From words to ``dimension`` numbers: ``x[|h(w)| mod dimension] += sign``.

    Attributes:
        dimension: Number of features.
        signed: Whether the sign is that of the hash, so that collisions cancel on
            average; else every word counts +1.
        binary: Whether a feature is 1 where any word fell, 0 elsewhere; signs then do
            not matter.
        l2: Whether each document is scaled to length 1; an empty one stays zero.
        function: The hash of a word, a signed whole number. The default is
            scikit-learn's, and so are the defaults of the others.
    """

    dimension: int
    signed: bool = True
    binary: bool = False
    l2: bool = True
    function: Callable[[str], int] = murmur3

    def __post_init__(self) -> None:
        if not is_whole(self.dimension, at_least=1):
            raise ConfigurationError(
                f"the dimension of the hashed features is {self.dimension!r}",
                "give the width of the model's input",
            )
        if not callable(self.function):
            raise ConfigurationError(
                f"the hash function is a {type(self.function).__name__}",
                "give a function from a word to a whole number",
            )

    def places(self, words: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Feature and sign of every word: int64 and float32, ``[R]`` each."""
        hashes = [self.function(word) for word in words]
        signs = [-1.0 if self.signed and h < 0 else 1.0 for h in hashes]
        columns = [abs(h) % self.dimension for h in hashes]
        return torch.tensor(columns), torch.tensor(signs)

    def features(self, columns: Tensor, values: Tensor, present: Tensor) -> Tensor:
        """Features of documents, ``[B, dimension]``, float32.

        Args:
            columns: Feature of each word, ``[B, T]``.
            values: Sign of each word, ``[B, T]``.
            present: 1 where there is a word, 0 after the end, ``[B, T]``.
        """
        features = torch.zeros(len(columns), self.dimension)
        if self.binary:
            features.scatter_add_(1, columns, present.float())
            features = (features > 0).float()
        else:
            features.scatter_add_(1, columns, values * present)
        if self.l2:
            norms = features.norm(dim=1, keepdim=True)
            features = features / torch.where(norms > 0, norms, 1.0)
        return features

    def describe(self) -> dict[str, JSON]:
        """All settings; the function by its name."""
        return {
            "dimension": self.dimension,
            "signed": self.signed,
            "binary": self.binary,
            "l2": self.l2,
            "function": getattr(self.function, "__name__", "function"),
        }


@dataclass(frozen=True)
class HashedDocumentProbe:
    """Documents of words drawn by rank, hashed: ``[B, dimension]``, float32.

    Attributes:
        hashing: How the user's text becomes numbers.
        lengths: Range of words per document, both ends included.
        words: A public word list, the most frequent first, or the number of made-up
            words, which hash as evenly.
        law: ``"zipf"`` (default), ``"uniform"``, or a :class:`RankLaw`.
    """

    hashing: Hashing
    lengths: tuple[int, int]
    words: tuple[str, ...] | int = field(default=30_000, repr=False)
    law: RankLaw | str = "zipf"

    def __post_init__(self) -> None:
        if not isinstance(self.hashing, Hashing):
            raise ConfigurationError(
                f"hashing is a {type(self.hashing).__name__}",
                "use Hashing(dimension=...), as your own features are made",
            )
        lengths = check_lengths(self.lengths, 1, "")
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "law", RankLaw.parse(self.law))
        given: Any = self.words
        if is_whole(given, at_least=1):
            return
        listed = tuple(given) if isinstance(given, tuple | list) else ()
        if not listed or not all(isinstance(word, str) for word in listed):
            raise ConfigurationError(
                f"words is {type(given).__name__}, empty or not of words",
                "give a public word list, the most frequent first, or a number",
            )
        object.__setattr__(self, "words", listed)

    @property
    def provenance(self) -> Provenance:
        """SYNTHETIC: a word list and its order are declared facts."""
        return Provenance.SYNTHETIC

    def inputs(self, size: int, generator: torch.Generator) -> Tensor:
        """Features ``[size, dimension]``, float32."""
        check_draw(size, generator)
        columns, signs = self._places
        longest = self.lengths[1]
        drawn = draw_lengths(self.lengths, size, generator)
        weights = RankLaw.parse(self.law).weights(len(columns))
        words = draw_categories(weights, (size, longest), generator)
        present = mask_of(drawn, longest)
        return self.hashing.features(columns[words], signs[words], present)

    def describe(self) -> dict[str, JSON]:
        """Hashing, lengths, law, and a checksum of a given word list."""
        made_up = isinstance(self.words, int)
        text = "" if made_up else "\n".join(self._words)
        return {
            "kind": "hashed documents",
            "hashing": self.hashing.describe(),
            "lengths": list(self.lengths),
            "words": len(self._words),
            "words_sha256": None
            if made_up
            else hashlib.sha256(text.encode()).hexdigest(),
            "law": RankLaw.parse(self.law).describe(),
        }

    @property
    def _words(self) -> tuple[str, ...]:
        if isinstance(self.words, int):
            return tuple(f"word{rank}" for rank in range(self.words))
        return self.words

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        return self.hashing.places(self._words)
