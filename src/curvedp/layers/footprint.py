"""Memory that a recorded forward pass holds until its backward pass, per example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from curvedp.layers.capture import Recording
from curvedp.layers.covered import Covered
from curvedp.layers.parts import parts_of
from curvedp.layers.synthetic import Synthesiser, as_call

__all__ = ["activation_bytes"]

_EXAMPLES = 2


def activation_bytes(
    model: nn.Module,
    covered: Sequence[Covered],
    synthesise: Synthesiser,
    parameters: Mapping[str, Tensor],
    seed: int,
) -> int:
    """Bytes an example: what autograd saves and what the recording keeps.

    Measured on a synthetic batch, so it is public. Storages count once, and parameters
    and buffers, which are there anyway, not at all.
    """
    owned = [*model.parameters(), *model.buffers(), *parameters.values()]
    known = {_storage(part) for t in owned for part in parts_of(t) or [t]}
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            held[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    batch = synthesise(_EXAMPLES, torch.Generator().manual_seed(seed))
    recording = Recording(model, covered, _EXAMPLES)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        # the output keeps the graph, and with it every storage, alive while we count
        output = recording.forward(*as_call(batch.inputs), parameters)
        for tensor in recording.inputs():
            note(tensor)
    del output
    return sum(held.values()) // _EXAMPLES


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
