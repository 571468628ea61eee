"""Which places of a model every forward pass writes anew: found with synthetic rows."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from curvedp.layers.bits import bits_of, random_numbers, random_state
from curvedp.layers.held import Place
from curvedp.layers.state import FEW, Spot, Spots, State, carries
from curvedp.layers.synthetic import Batch, Synthesiser, as_call

__all__ = ["written_anew"]


def written_anew(
    model: nn.Module, synthesise: Synthesiser, seed: int = 0
) -> frozenset[Place]:
    """Places that every forward pass writes anew, whatever stood there before.

    Found with synthetic rows: what two batches leave is not the same (else it is a
    cache or a counter), and what one of them leaves, and the model's output, does not
    depend on what the other had left.

    Raises:
        CouplingError: something keeps what it has seen, and goes on from there.
    """
    state = State(model)
    start = random_state({p.device for p in model.parameters()})

    def passed(given: Batch) -> tuple[Hashable, dict[Spot, Hashable], Spots]:
        args, kwargs = as_call(given.inputs)
        with random_numbers(model, start), torch.no_grad():
            output = model(*args, **kwargs)
        spots = state.spots(printed=True)
        if any(spot[0] in ("weights", "_parameters") for spot in spots):
            state.refuse(spots)
        return bits_of(output), {s: state.bits(s) for s in spots}, spots

    state.open()
    try:
        generator = torch.Generator().manual_seed(seed + 5)
        batch, other = synthesise(FEW, generator), synthesise(FEW, generator)
        state.restore(weights=True)  # to make them may take a pass
        first, left, places = passed(batch)
        if not left:
            return frozenset()
        state.restore(weights=False)
        _, left_by_other, more = passed(other)
        places |= more
        differ = {
            spot
            for spot in left.keys() | left_by_other.keys()
            if left.get(spot) != left_by_other.get(spot)
        }
        hard = [places[s] for s in differ if s[0] not in ("key", "node")]
        if hard:
            raise carries(hard[0])
        state.anew = frozenset(places[s] for s in differ)
        kept = state.kept_anew()
        state.restore(weights=False)
        kept()
        again, left_again, _ = passed(batch)
        kept_on = [s for s in differ if left_again.get(s) != left.get(s)]
        if kept_on or (differ and again != first):
            state.restore(weights=False)
            if passed(batch)[:2] == (first, left):  # no random numbers of its own
                raise carries(places[(kept_on or list(differ))[0]])
        return state.anew
    finally:
        state.restore(weights=True)
