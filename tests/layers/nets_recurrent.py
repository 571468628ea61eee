"""Recurrent layers and cells on sequences ``[B, T, D]``."""

import torch
from torch import nn


class Unrolled(nn.Module):
    """A recurrent layer; ``begin`` makes its first states from the inputs."""

    def __init__(self, kind, d, begin=False, **options):
        super().__init__()
        options = {"batch_first": True, **options}
        self.layer = kind(d, d, **options)
        self.begin = begin
        self.back = nn.Linear(self.width(d), d, bias=False)

    def width(self, d):
        return (self.layer.proj_size or d) * (2 if self.layer.bidirectional else 1)

    def states(self, x):
        layer = self.layer
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        x = x if layer.batch_first else x.transpose(0, 1)
        h = x.mean(1).expand(count, -1, -1)
        return (h, h * h) if isinstance(layer, nn.LSTM) else h

    def forward(self, x):
        first = self.layer.batch_first
        x = x if first else x.transpose(0, 1)
        states = (self.states(x),) if self.begin else ()
        y, last = self.layer(x, *states)
        y = self.back(y if first else y.transpose(0, 1))
        parts = last if isinstance(last, tuple) else (last,)
        return y + sum(part.mean((0, 2))[:, None, None] for part in parts)


class Cells(nn.Module):
    """A cell, called at every step."""

    def __init__(self, kind, d, **options):
        super().__init__()
        self.cell = kind(d, d, **options)

    def forward(self, x):
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state) if outputs else self.cell(step)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


def tied_recurrent(d):
    """Both layers of a stack with one recurrent weight; some others frozen."""
    block = Unrolled(nn.GRU, d, num_layers=2)
    block.layer.weight_hh_l1 = block.layer.weight_hh_l0
    block.layer.bias_ih_l0.requires_grad_(False)
    block.layer.weight_ih_l1.requires_grad_(False)
    return block


def recurrent_blocks(d):
    return {
        "rnn": lambda: Unrolled(nn.RNN, d),
        "rnn-relu": lambda: Unrolled(
            nn.RNN, d, nonlinearity="relu", num_layers=2, bias=False
        ),
        "rnn-bidirectional": lambda: Unrolled(nn.RNN, d, bidirectional=True),
        "lstm": lambda: Unrolled(nn.LSTM, d),
        "lstm-begin": lambda: Unrolled(nn.LSTM, d, begin=True, num_layers=2),
        "lstm-deep": lambda: Unrolled(nn.LSTM, d, num_layers=2, bidirectional=True),
        "lstm-projected": lambda: Unrolled(
            nn.LSTM, d, num_layers=2, proj_size=3, bidirectional=True
        ),
        "lstm-no-bias": lambda: Unrolled(nn.LSTM, d, bias=False),
        "lstm-time-first": lambda: Unrolled(nn.LSTM, d, batch_first=False),
        "gru": lambda: Unrolled(nn.GRU, d),
        "gru-begin": lambda: Unrolled(
            nn.GRU, d, begin=True, num_layers=2, bidirectional=True
        ),
        "gru-no-bias": lambda: Unrolled(nn.GRU, d, bias=False, batch_first=False),
        "gru-tied": lambda: tied_recurrent(d),
        "rnn-cell": lambda: Cells(nn.RNNCell, d, nonlinearity="relu"),
        "lstm-cell": lambda: Cells(nn.LSTMCell, d),
        "gru-cell": lambda: Cells(nn.GRUCell, d, bias=False),
    }
