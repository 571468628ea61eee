"""Token sequences with the structure of text and none of its content.

Every sequence has its own length, uniform in a declared range; special tokens stand
where the model expects them; the mask is 1 exactly on the sequence, its closing
separator included, and 0 on the padding after it. (DP-KFC's Algorithm 4 writes the
separator one position behind the mask.) Sequences are padded to the longest length of
the *range*, so shapes do not depend on the draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.probes.checks import check_draw, check_lengths
from curvedp.probes.laws import RankLaw, draw_categories
from curvedp.probes.vocabulary import TokenSpec

__all__ = ["TokenProbe", "check_sequences", "draw_lengths", "framed", "mask_of"]


@dataclass(frozen=True)
class TokenProbe:
    """Words drawn independently by their rank.

    Attributes:
        spec: The vocabulary.
        lengths: Range of the sequence lengths, both ends included, special tokens
            counted.
        law: ``"zipf"`` (Zipf-Mandelbrot, default), ``"uniform"`` (DP-KFC's Algorithm
            4), or a :class:`RankLaw`.
        as_mapping: Whether to give ``{"input_ids", "attention_mask"}``; else the ids
            alone, for models that take a tensor.
    """

    spec: TokenSpec
    lengths: tuple[int, int]
    law: RankLaw | str = "zipf"
    as_mapping: bool = True

    def __post_init__(self) -> None:
        lengths = check_sequences(self.spec, self.lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "law", RankLaw.parse(self.law))

    @property
    def provenance(self) -> Provenance:
        """SYNTHETIC: a vocabulary and its order are declared facts."""
        return Provenance.SYNTHETIC

    def inputs(self, size: int, generator: torch.Generator) -> Any:
        """Ids (and mask) ``[size, T]``, int64, T the longest length."""
        check_draw(size, generator)
        drawn = draw_lengths(self.lengths, size, generator)
        words = self.spec.ordinary
        weights = RankLaw.parse(self.law).weights(len(words))
        payload = words[draw_categories(weights, (size, self.lengths[1]), generator)]
        ids = framed(
            payload,
            drawn,
            prefix=torch.tensor(self.spec.prefix, dtype=torch.int64),
            suffix=torch.tensor(self.spec.suffix, dtype=torch.int64),
            padding=torch.tensor(self.spec.pad or 0),
        )
        if not self.as_mapping:
            return ids
        return {"input_ids": ids, "attention_mask": mask_of(drawn, ids.shape[1])}

    def describe(self) -> dict[str, JSON]:
        """Vocabulary, lengths, law."""
        return {
            "kind": "tokens",
            "vocabulary": self.spec.describe(),
            "lengths": list(self.lengths),
            "law": RankLaw.parse(self.law).describe(),
            "as_mapping": self.as_mapping,
        }


def check_sequences(spec: TokenSpec, lengths: Any) -> tuple[int, int]:
    """The range of lengths, if sequences of this vocabulary can have them."""
    if not isinstance(spec, TokenSpec):
        raise ConfigurationError(
            f"the vocabulary is a {type(spec).__name__}",
            "use TokenSpec(...) or TokenSpec.from_tokenizer(tokenizer)",
        )
    room = " (special tokens need room)" if spec.framing > 1 else ""
    shortest, longest = check_lengths(lengths, max(spec.framing, 1), room)
    if shortest < longest and spec.pad is None:
        raise ConfigurationError(
            "sequences of different lengths need padding, and the vocabulary has no "
            "pad id",
            "give TokenSpec a pad (a model with a mask ignores which: the id of eos "
            "will do), or a single length: lengths=(n, n)",
        )
    return shortest, longest


def draw_lengths(
    lengths: tuple[int, int], size: int, generator: torch.Generator
) -> Tensor:
    """A length for each example, uniform in the range, ``[size]``, int64."""
    shortest, longest = lengths
    return torch.randint(shortest, longest + 1, (size,), generator=generator)


def mask_of(lengths: Tensor, longest: int) -> Tensor:
    """1 on the first ``lengths[i]`` positions, 0 after: ``[B] -> [B, T]``, int64."""
    return (torch.arange(longest)[None, :] < lengths[:, None]).long()


def framed(
    payload: Tensor, lengths: Tensor, *, prefix: Tensor, suffix: Tensor, padding: Tensor
) -> Tensor:
    """Put special tokens and padding into sequences of words.

    Args:
        payload: Words at all positions, ids ``[B, T]`` or embeddings ``[B, T, p]``.
        lengths: Length of each sequence with its special tokens, ``[B]``.
        prefix: Goes to the first positions, ``[a]`` or ``[a, p]``.
        suffix: Goes to the last positions of each sequence, ``[b]`` or ``[b, p]``.
        padding: Goes to all positions after those, ``[]`` or ``[p]``.
    """
    out = payload.clone()
    out[:, : len(prefix)] = prefix
    rows = torch.arange(len(out))
    for back, token in enumerate(suffix.flip(0), start=1):
        out[rows, lengths - back] = token
    out[mask_of(lengths, out.shape[1]) == 0] = padding
    return out
