"""What tells one value from every other, bit by bit; and random numbers drawn again."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from curvedp.layers.held import missing
from curvedp.layers.parts import parts_of

__all__ = [
    "Flag",
    "RandomState",
    "any_of",
    "bits_of",
    "differ",
    "random_numbers",
    "random_state",
]

#: Whether something is so; on a GPU a tensor, for which nobody has waited.
Flag = bool | Tensor

#: Of the CPU (under None) and of devices.
RandomState = dict[torch.device | None, Tensor]


def bits_of(value: object, seen: tuple[int, ...] = ()) -> Hashable:
    """What tells a value from every other one, bit by bit."""
    kind = type(value).__name__
    if id(value) in seen:
        return kind
    seen = (*seen, id(value))
    if isinstance(value, Tensor):
        held = value.detach()
        parts = parts_of(held)
        if parts is not None:
            return kind, tuple(held.shape), tuple(bits_of(p) for p in parts)
        if held.is_quantized or held.device.type == "meta":
            return kind, str(held)
        flat = held.cpu().contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        digest = hashlib.blake2b(raw).digest()
        return kind, str(value.dtype), tuple(value.shape), digest
    if isinstance(value, dict):
        return kind, tuple(
            (bits_of(k, seen), bits_of(v, seen)) for k, v in value.items()
        )
    if isinstance(value, list | tuple):
        return kind, tuple(bits_of(v, seen) for v in value)
    if value is missing or value is None or isinstance(value, bool | str | bytes):
        return kind, value
    if isinstance(value, int | float | complex):
        return kind, repr(value)
    if isinstance(value, nn.Module) or hasattr(value, "__dict__"):
        return kind, bits_of(vars(value), seen)
    try:
        return kind, pickle.dumps(value)
    except Exception:  # of whatever kind; it then equals itself alone
        return kind, id(value)


def differ(x: Tensor, y: Tensor) -> Flag:
    """Whether whole numbers differ."""
    return not torch.equal(x, y) if x.device.type == "cpu" else (x != y).any()


def any_of(flags: Iterable[Flag]) -> bool:
    """Whether one of them is set; the CPU waits once for each device."""
    waiting: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        if isinstance(flag, Tensor):
            waiting.setdefault(flag.device, []).append(flag)
        elif flag:
            return True
    return any(
        bool(torch.stack(own).any() if len(own) > 1 else own[0])
        for own in waiting.values()
    )


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """Of torch's generators on the CPU and on GPUs among these devices."""
    states: RandomState = {None: torch.get_rng_state()}
    for device in devices:
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            states[device] = torch.cuda.get_rng_state(device)
    return states


@contextmanager
def random_numbers(model: nn.Module, states: RandomState) -> Iterator[None]:
    """As they were at a time, and after it as if nothing had been drawn."""
    devices = [device for device in states if device is not None]
    with torch.random.fork_rng(devices=devices):
        for device, state in states.items():
            if device is None:
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        yield
