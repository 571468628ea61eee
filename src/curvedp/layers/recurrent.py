r"""``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells, unrolled.

For a layer and direction, with ``X [B, T, p]`` and the states ``h_t [B, H]``:

    U_t = W_ih x_t + b_ih        for the whole sequence at once
    V_t = W_hh h_{t-1} + b_hh    step by step

===========  ==============================================================  ========
RNN          ``h_t = tanh(U_t + V_t)`` or relu                               r = H
LSTM         ``i, f, g, o = U_t + V_t``; ``c_t = f c_{t-1} + i g``;          r = 4 H
             ``h_t = W_hr (o tanh(c_t))``, without ``W_hr`` if not projected
GRU          ``n = tanh(U^n_t + r V^n_t)``; ``h_t = n + z (h_{t-1} - n)``    r = 3 H
===========  ==============================================================  ========

Gradients: ``(X, dU)`` for ``W_ih, b_ih`` and ``(h_{0..T-1}, dV)`` for ``W_hh, b_hh``.
Only whole sequences are watched: ``V_t`` begins at a row of a watched tensor
(``b_hh`` repeated, with U added where ``dU = dV``), whose gradient is ``[B, T, r]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from curvedp.errors import CouplingError, CoverageError
from curvedp.layers.rewrite import Rewrite, Tape

__all__ = ["find_rewrite"]

#: h and, for the LSTM, c; others carry c along.
_State = tuple[Tensor, Tensor]


def find_rewrite(module: nn.Module) -> Rewrite | None:
    """The rewrite for a module whose forward is that of a recurrent type, or None."""
    for base, rewrite in _REWRITES.items():
        if isinstance(module, base) and type(module).forward is base.forward:
            return None if hasattr(module, "parametrizations") else rewrite
    return None


@dataclass(frozen=True)
class _Pass:
    """One layer in one direction, or a cell."""

    module: nn.Module
    tape: Tape
    suffix: str
    gates: str  # "RNN_TANH", "RNN_RELU", "LSTM", "GRU"

    def name(self, kind: str) -> str | None:
        """Own name of a parameter, None where the module has none of the kind."""
        name = f"{kind}{self.suffix}"
        return name if getattr(self.module, name, None) is not None else None

    def value(self, kind: str) -> Any:
        name = self.name(kind)
        return None if name is None else getattr(self.module, name)

    def run(self, x: Tensor, state: _State) -> tuple[Tensor, _State]:
        """``x [B, T, p]`` and the first state to ``h_{1..T} [T, B, .]``, last state."""
        shared = self.gates != "GRU"  # dU = dV
        u = F.linear(x, self.value("weight_ih"), self.value("bias_ih"))
        bias_hh = self.value("bias_hh")
        if shared and bias_hh is not None:
            u = u + bias_hh
        u, seen = self.tape.watch(u)
        self._use("weight_ih", "bias_ih", x, seen)
        v = u
        if not shared:
            v = u.new_zeros(u.shape) if bias_hh is None else bias_hh.expand_as(u)
            v, seen = self.tape.watch(v.clone())
        step = {"LSTM": _lstm, "GRU": _gru}.get(self.gates, self._simple)
        projection = self.value("weight_hr")
        bases: tuple[Tensor, ...] = ()
        projected = None
        if projection is not None:
            zeros = u.new_zeros(*u.shape[:2], projection.shape[0])
            zeros, projected = self.tape.watch(zeros)
            bases = zeros.unbind(1)
        weight = self.value("weight_hh").mT
        h, c = state[0].to(u.dtype), state[1].to(u.dtype)
        before, wide, after = [], [], []
        for t, (u_t, v_t) in enumerate(zip(u.unbind(1), v.unbind(1), strict=True)):
            before.append(h)
            h, c = step(u_t, torch.addmm(v_t, h, weight), h, c)
            if projection is not None:
                wide.append(h)
                h = torch.addmm(bases[t], h, projection.mT)
            after.append(h)
        self._use("weight_hh", "bias_hh", torch.stack(before, 1), seen)
        if projection is not None:
            self._use("weight_hr", None, torch.stack(wide, 1), projected)
        return torch.stack(after), (h, c)

    def _use(self, weight: str, bias: str | None, x: Tensor, seen: Any) -> None:
        name = self.name(weight)
        assert name is not None
        self.tape.use(name, self.name(bias) if bias else None, x, seen)

    def _simple(self, u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> _State:
        return (v.relu() if self.gates == "RNN_RELU" else v.tanh()), c


def _lstm(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> _State:
    i, f, g, o = v.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> _State:
    (u_r, u_z, u_n), (v_r, v_z, v_n) = u.chunk(3, 1), v.chunk(3, 1)
    n = (u_n + (u_r + v_r).sigmoid() * v_n).tanh()
    return n + (u_z + v_z).sigmoid() * (h - n), c


def _sequence(
    module: nn.RNNBase, tape: Tape, label: str, input: Any, hx: Any = None
) -> Any:
    """The forward of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``."""
    if isinstance(input, PackedSequence):
        raise CoverageError(
            f"layer {label!r} ({type(module).__name__}) is given a PackedSequence, in "
            "which the steps of all examples stand mixed",
            "give it the padded tensor and mask afterwards: take each example's output "
            "at its last real step (output[arange, lengths - 1]) or a masked mean",
        )
    _refuse_unbatched(module, label, input, 3)
    x = input if module.batch_first else input.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    width = module.proj_size or module.hidden_size
    pair = module.mode == "LSTM"
    shape = module.num_layers * directions, len(x), module.hidden_size
    if hx is None:
        states = x.new_zeros(*shape[:2], width), x.new_zeros(shape)
    else:
        states = hx if pair else (hx, hx)
    last: list[_State] = []
    for layer in range(module.num_layers):
        outputs = []
        for backward in range(directions):
            suffix = f"_l{layer}" + ("_reverse" if backward else "")
            own = _Pass(module, tape, suffix, module.mode)
            k = len(last)
            y, state = own.run(
                x.flip(1) if backward else x, (states[0][k], states[1][k])
            )
            outputs.append(y.flip(0) if backward else y)
            last.append(state)
        y = torch.cat(outputs, 2)  # [T, B, .], in which torch draws its dropout masks
        if module.dropout and module.training and layer < module.num_layers - 1:
            y = F.dropout(y, module.dropout)
        x = y.transpose(0, 1)
    output = x if module.batch_first else y
    h, c = (torch.stack([state[i] for state in last]) for i in range(2))
    return output, ((h, c) if pair else h)


def _cell(gates: Callable[[Any], str]) -> Rewrite:
    def forward(
        module: nn.RNNCellBase, tape: Tape, label: str, input: Tensor, hx: Any = None
    ) -> Any:
        _refuse_unbatched(module, label, input, 2)
        mode = gates(module)
        if hx is None:
            zeros = input.new_zeros(len(input), module.hidden_size)
            hx = (zeros, zeros) if mode == "LSTM" else zeros
        state = hx if mode == "LSTM" else (hx, hx)
        _, last = _Pass(module, tape, "", mode).run(input.unsqueeze(1), state)
        return last if mode == "LSTM" else last[0]

    return Rewrite(forward)


def _refuse_unbatched(module: nn.Module, label: str, x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        raise CouplingError(
            f"layer {label!r} ({type(module).__name__}) is given an input of shape "
            f"{tuple(x.shape)}, without a batch dimension",
            f"give it {dims} dimensions, one of them the batch",
        )


_REWRITES: dict[type[nn.Module], Rewrite] = {
    nn.RNN: Rewrite(_sequence),
    nn.LSTM: Rewrite(_sequence),
    nn.GRU: Rewrite(_sequence),
    nn.RNNCell: _cell(lambda m: f"RNN_{m.nonlinearity.upper()}"),
    nn.LSTMCell: _cell(lambda m: "LSTM"),
    nn.GRUCell: _cell(lambda m: "GRU"),
}
