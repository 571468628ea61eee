"""Embeddings: a gradient row for every token, added up where tokens repeat.

``g_i[v] = sum over positions t with token v of d_t``. A position whose token is the
padding index contributes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvedp.layers.io import LayerIO, replace_examples, uses_together
from curvedp.layers.precision import ROUNDING, compute_dtype, norm_dtype
from curvedp.layers.rounding import counted, sq_length

__all__ = ["LookupIO"]


@dataclass(frozen=True, repr=False)
class LookupIO(LayerIO):
    """Token ids and output gradients of an embedding.

    Attributes:
        name: module name.
        weight: name of the table, ``[V, r]``.
        rows: V, the number of table rows.
        padding: token id that has no gradient, or None.
        calls: ``(ids [B, ...], d [B, ..., r])`` for every call of the module.
    """

    name: str
    weight: str
    rows: int
    padding: int | None
    calls: Sequence[tuple[Tensor, Tensor]]

    @property
    def batch_size(self) -> int:
        return self.calls[0][0].shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """All calls together: ids ``[B, T]`` and ``d [B, T, r]``, padding removed."""
        b = self.batch_size
        ids = torch.cat([i.reshape(b, -1) for i, _ in self.calls], 1)
        d = torch.cat([d.reshape(b, -1, d.shape[-1]) for _, d in self.calls], 1)
        d = d.to(compute_dtype(d))
        if self.padding is not None:
            d = d.masked_fill((ids == self.padding).unsqueeze(-1), 0)
        return ids, d

    def sq_norms(self) -> Tensor:
        # Sort each example's tokens so that equal ones are neighbours, number the
        # runs, and add each run up: a sum of squares of the true rows, in fixed shapes.
        ids, d = self.tokens()
        summed_in = d.dtype
        in_sum = (ids.shape[1] + 8) * ROUNDING[summed_in]
        d = d.to(norm_dtype(d))
        ids, order = ids.sort(dim=1)
        d = d.gather(1, order.unsqueeze(-1).expand_as(d))
        new_run = torch.ones_like(ids)
        new_run[:, 1:] = ids[:, 1:] != ids[:, :-1]
        run = new_run.cumsum(1) - 1
        index = run.unsqueeze(-1).expand_as(d)
        summed = torch.zeros_like(d).scatter_add_(1, index, d)
        # Repeated tokens can cancel; curvedp.layers.dense explains the allowances.
        lengths = torch.zeros_like(run, dtype=d.dtype).scatter_add_(
            1, run, torch.linalg.vector_norm(d, dim=-1)
        )
        spread = lengths.double().square().sum(1)
        norms = sq_length(summed).sqrt()
        in_norm = (ids.shape[1] + 8) * ROUNDING[d.dtype]
        return counted(norms.square(), spread.sqrt(), in_norm + in_sum, summed_in)

    def weighted_sum(
        self, weights: Tensor, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        def summed(dtype: torch.dtype) -> dict[str, Tensor]:
            return self._summed(weights, dtype)

        like = self.calls[0][1]
        if len(self.calls) > 1:
            return uses_together(self, weights, like, summed)
        return summed(dtype or compute_dtype(like))

    def _summed(self, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        ids, d = self.tokens()
        d = d.to(dtype)
        scaled = d * weights.to(d.dtype).reshape(-1, 1, 1)
        table = d.new_zeros(self.rows, d.shape[-1])
        table.index_add_(0, ids.flatten(), scaled.flatten(0, 1))
        return {self.weight: table}

    def keep(self, mask: Tensor) -> LookupIO:
        return replace(
            self, calls=[(i, replace_examples(d, mask)) for i, d in self.calls]
        )

    def take(self, part: slice) -> LookupIO:
        return replace(self, calls=[(i[part], d[part]) for i, d in self.calls])

    def spread(self) -> tuple[Tensor, float]:
        ids, d = self.tokens()
        lengths = torch.linalg.vector_norm(d.to(norm_dtype(d)), dim=-1)
        return lengths.double().sum(1), (ids.shape[1] + 8) * ROUNDING[d.dtype]

    def per_example(self) -> dict[str, Tensor]:
        ids, d = self.tokens()
        table = d.new_zeros(self.batch_size, self.rows, d.shape[-1])
        table.scatter_add_(1, ids.unsqueeze(-1).expand_as(d), d)
        return {self.weight: table}
