"""Texts written by a public language model: the closest to real text without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.probes.checks import check_draw
from curvedp.probes.laws import (
    RankLaw,
    check_temperature,
    draw_categories,
    draw_rows,
)
from curvedp.probes.tokens import check_sequences, draw_lengths, framed, mask_of
from curvedp.probes.vocabulary import TokenSpec

__all__ = ["GeneratedTokenProbe"]


@dataclass(frozen=True, eq=False)
class GeneratedTokenProbe:
    """Words drawn one after the other from ``softmax(logits / temperature)``.

    The first word follows the prefix, or a Zipf draw where there is no prefix. Special
    ids, and ids of the model that the vocabulary does not have, are never drawn: the
    length is that of the declared range, not where the model would end. A sequence of T
    words costs T forward passes, made in evaluation mode without gradients.

    Attributes:
        model: ids ``[B, t] -> logits [B, t, V]`` (or an object with such ``logits``)
            whose output at t depends on ids up to t. A module gets ids on its own
            device.
        spec: The vocabulary that the model was trained with.
        lengths: Range of the sequence lengths, both ends included, special tokens
            counted.
        temperature: 1 draws from the model; below it is surer, 0 always takes the
            likeliest word; above it is wilder.
        source: PUBLIC for a pretrained model, RELEASED for the model that a private
            run is training.
        as_mapping: Whether to give ``{"input_ids", "attention_mask"}``; else the ids
            alone.
    """

    model: Callable[[Tensor], Any] = field(repr=False)
    spec: TokenSpec
    lengths: tuple[int, int]
    temperature: float = 1.0
    source: Provenance = Provenance.PUBLIC
    as_mapping: bool = True

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise ConfigurationError(
                f"the language model is a {type(self.model).__name__}",
                "give a function or module from ids [B, t] to logits [B, t, V]",
            )
        lengths = check_sequences(self.spec, self.lengths)
        object.__setattr__(self, "lengths", lengths)
        check_temperature(self.temperature)
        if not isinstance(self.source, Provenance):
            raise ConfigurationError(
                f"source is {self.source!r}",
                "use Provenance.PUBLIC for a pretrained model",
            )

    @property
    def provenance(self) -> Provenance:
        """That of the model: PUBLIC unless declared otherwise."""
        return self.source

    def inputs(self, size: int, generator: torch.Generator) -> Any:
        """Ids (and mask) ``[size, T]``, int64, T the longest length."""
        check_draw(size, generator)
        drawn = draw_lengths(self.lengths, size, generator)
        prefix = torch.tensor(self.spec.prefix, dtype=torch.int64)
        suffix = torch.tensor(self.spec.suffix, dtype=torch.int64)
        ids = framed(
            self._write(prefix, size, generator),
            drawn,
            prefix=prefix,
            suffix=suffix,
            padding=torch.tensor(self.spec.pad or 0),
        )
        if not self.as_mapping:
            return ids
        return {"input_ids": ids, "attention_mask": mask_of(drawn, ids.shape[1])}

    def describe(self) -> dict[str, JSON]:
        """Vocabulary, lengths, temperature, source."""
        return {
            "kind": "generated tokens",
            "model": type(self.model).__name__,
            "vocabulary": self.spec.describe(),
            "lengths": list(self.lengths),
            "temperature": self.temperature,
            "source": self.source.value,
            "as_mapping": self.as_mapping,
        }

    def _write(self, prefix: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """The prefix and words after it up to the longest length, ``[size, T]``."""
        words = self.spec.ordinary
        text = prefix.expand(size, -1)
        if not len(prefix):
            first = RankLaw().weights(len(words))
            text = words[draw_categories(first, (size, 1), generator)]
        with torch.no_grad(), _evaluating(self.model) as device:
            while text.shape[1] < self.lengths[1]:
                logits = self._next_logits(text.to(device))
                word = words[draw_rows(logits[:, words], self.temperature, generator)]
                text = torch.cat([text, word[:, None]], 1)
        return text[:, : self.lengths[1]].clone()

    def _next_logits(self, text: Tensor) -> Tensor:
        """Logits of the word after the text, ``[B, t] -> [B, V]``, on the CPU."""
        output = self.model(text)
        logits = getattr(output, "logits", output)
        fits = (
            isinstance(logits, Tensor)
            and logits.dim() == 3
            and logits.shape[:2] == text.shape
            and logits.shape[2] >= self.spec.size
        )
        if not fits:
            found = (
                tuple(logits.shape)
                if isinstance(logits, Tensor)
                else type(logits).__name__
            )
            raise ConfigurationError(
                f"the language model gave {found} for ids of shape {tuple(text.shape)} "
                f"and a vocabulary of {self.spec.size}",
                "it must give logits [B, t, V], with V at least the vocabulary's size",
            )
        last: Tensor = logits[:, -1].cpu()
        return last


@contextmanager
def _evaluating(model: Any) -> Iterator[torch.device]:
    """A module in evaluation mode (dropout would draw globally); gives its device."""
    if not isinstance(model, nn.Module):
        yield torch.device("cpu")
        return
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield next((p.device for p in model.parameters()), torch.device("cpu"))
    finally:
        for module, mode in modes.items():  # a frozen part stays as it is
            module.training = mode
