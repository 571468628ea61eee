"""What is publicly known about a vocabulary: its size, special ids, order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.probes.checks import whole_tuple
from curvedp.values import is_whole

__all__ = ["TokenSpec"]

#: Entries that tokenizers reserve and that text hardly ever holds: ``[unused12]``,
#: ``<unused12>``, byte fallbacks ``<0x0A>``. They stand first in their vocabularies, so
#: a rank law over all ids would give them most of the weight.
_RESERVED = re.compile(r"[\[<]\|?(?:unused_?\d+|0x[0-9A-Fa-f]{2})\|?[\]>]")

_NAMED = ("pad", "bos", "eos", "cls", "sep", "unk", "mask")


@dataclass(frozen=True)
class TokenSpec:
    """Ids of a vocabulary, as its tokenizer declares them.

    Attributes:
        size: Number of ids; the embedding table has at least as many rows.
        pad: Id of padding, and likewise the other special ids; None where there is
            none. Special ids are never drawn as words.
        bos: Begin of a text.
        eos: End of a text.
        cls: Classification token at the begin.
        sep: Separator at the end.
        unk: Unknown word.
        mask: Hidden word.
        others: Further ids that are never drawn.
        prefix: Ids that start every sequence. None: ``cls``, else ``bos``, else none.
        suffix: Ids that end it, in the mask. None: ``sep``, else ``eos``, else none.
        order: Ids by public frequency, the most frequent first; ids left out are never
            drawn. None: the order of the ids, which most tokenizers assign by
            frequency.
    """

    size: int
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    unk: int | None = None
    mask: int | None = None
    others: tuple[int, ...] = ()
    prefix: tuple[int, ...] | None = None
    suffix: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.size, at_least=1):
            raise ConfigurationError(
                f"the vocabulary has {self.size!r} ids",
                "give the number of rows of the embedding table",
            )
        for name in _NAMED:
            value = getattr(self, name)
            if value is not None:
                self._check_ids(name, (value,))
        starts = self.cls if self.cls is not None else self.bos
        ends = self.sep if self.sep is not None else self.eos
        defaults = {"prefix": starts, "suffix": ends}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, () if default is None else (default,))
        for name in ("others", "prefix", "suffix", "order"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, self._check_ids(name, value))
        if self.order is not None and len(set(self.order)) < len(self.order):
            raise ConfigurationError(
                "order lists an id twice", "list every id once, the most frequent first"
            )
        if not len(self.ordinary):
            raise ConfigurationError(
                f"all {self.size} ids of the vocabulary are special, so there are no "
                "words to draw",
                "give the size of the whole vocabulary, not of its special part",
            )

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, order: Sequence[int] | None = None
    ) -> TokenSpec:
        """From a tokenizer in the style of Hugging Face.

        Used are ``get_vocab()`` (or ``vocab_size``), ``all_special_ids``, the
        attributes ``pad_token_id`` etc., and ``encode``: what it puts around a word
        becomes prefix and suffix. That decides for GPT-2, which has ids for begin and
        end and uses neither.

        Args:
            tokenizer: The tokenizer; it is only asked, never changed.
            order: Ids by public frequency; by default their own order without the
                entries that are reserved (``[unused0]``, bytes).
        """
        vocabulary = _vocabulary(tokenizer)
        named = {name: getattr(tokenizer, f"{name}_token_id", None) for name in _NAMED}
        special = tuple(getattr(tokenizer, "all_special_ids", ()))
        never = {*special, *(i for i in named.values() if i is not None)}
        unknown = named["unk"]
        framing = never - {unknown} | {
            i for name, i in named.items() if name != "unk" and i is not None
        }
        prefix, suffix = _frame(tokenizer, framing)
        if order is None:
            order = sorted(
                i for word, i in vocabulary.items() if not _RESERVED.fullmatch(word)
            )
        return cls(
            size=max(vocabulary.values()) + 1,
            others=special,
            prefix=prefix,
            suffix=suffix,
            order=tuple(order),
            **named,
        )

    @property
    def special(self) -> frozenset[int]:
        """Ids that are never drawn as words."""
        named = (getattr(self, name) for name in _NAMED)
        framing = (*(self.prefix or ()), *(self.suffix or ()))
        return frozenset((*(i for i in named if i is not None), *self.others, *framing))

    @cached_property
    def ordinary(self) -> Tensor:
        """Ids of the words, the most frequent first, ``[R]``, int64."""
        order = range(self.size) if self.order is None else self.order
        special = self.special
        return torch.tensor([i for i in order if i not in special], dtype=torch.int64)

    @property
    def framing(self) -> int:
        """Number of ids in prefix and suffix together."""
        return len(self.prefix or ()) + len(self.suffix or ())

    def describe(self) -> dict[str, JSON]:
        """Size, framing, and a checksum of the order."""
        digest = hashlib.sha256(self.ordinary.numpy().tobytes()).hexdigest()
        return {
            "size": self.size,
            "pad": self.pad,
            "prefix": list(self.prefix or ()),
            "suffix": list(self.suffix or ()),
            "words": len(self.ordinary),
            "order_sha256": digest,
        }

    def _check_ids(self, name: str, ids: Any) -> tuple[int, ...]:
        found = whole_tuple(name, ids)
        outside = [i for i in found if i >= self.size]
        if outside:
            raise ConfigurationError(
                f"{name} names the id {outside[0]}, and the vocabulary has the ids 0 "
                f"to {self.size - 1}",
                "size counts special and added tokens too",
            )
        return found


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    if callable(getattr(tokenizer, "get_vocab", None)):
        vocabulary = dict(tokenizer.get_vocab())
    elif is_whole(getattr(tokenizer, "vocab_size", None)):
        vocabulary = {str(i): i for i in range(tokenizer.vocab_size)}
    else:
        raise ConfigurationError(
            f"{type(tokenizer).__name__} has neither get_vocab() nor vocab_size",
            "write its ids down: TokenSpec(size=..., pad=..., cls=..., sep=...)",
        )
    if not vocabulary:
        raise ConfigurationError(
            f"the vocabulary of {type(tokenizer).__name__} is empty",
            "load or train the tokenizer first",
        )
    return vocabulary


def _frame(
    tokenizer: Any, framing: set[int]
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """What ``encode`` puts before and after a word; None where it cannot be asked."""
    if not callable(getattr(tokenizer, "encode", None)):
        return None, None
    encoded = tokenizer.encode("a")
    ids = [int(i) for i in getattr(encoded, "ids", encoded)]
    inner = [n for n, i in enumerate(ids) if i not in framing]
    if not inner:  # no word is left to tell the begin from the end
        return None, None
    return tuple(ids[: inner[0]]), tuple(ids[inner[-1] + 1 :])
