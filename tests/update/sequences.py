"""Random sequences of released gradients, and rules run on them coordinate by one."""

import statistics

import torch

from curvedp.update import Gradient

SHAPES = {"weight": (3, 2), "bias": (4,), "scalar": ()}


def parameters(dtype=torch.float32, shapes=SHAPES):
    return {
        n: torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for n, s in shapes.items()
    }


def sequence(steps, seed, dtype=torch.float32, shapes=SHAPES, scale=1.0):
    """Gradients and noise variances that differ by step, coordinate and parameter."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = []
    for _ in range(steps):
        values = {n: (scale * draw(s)).to(dtype) for n, s in shapes.items()}
        # a number for some parameters, a tensor for others
        noise = {
            n: scale**2 * 0.3 * (draw(() if n == "bias" else s).abs() + 0.1)
            for n, s in shapes.items()
        }
        found.append(Gradient(values, noise))
    return found


def run(transform, gradients, like):
    """Outputs of every step, and the last state."""
    state = transform.init(like)
    outputs = []
    for gradient in gradients:
        output, state = transform.update(gradient, state)
        outputs.append(output)
    return outputs, state


def coordinates(dicts, name, shape):
    """``[coordinates][steps]`` as Python floats."""
    rows = [d[name].double().expand(shape).reshape(-1).tolist() for d in dicts]
    return [list(column) for column in zip(*rows, strict=True)]


def worst(found, expected):
    """Largest error of any step, relative to its value or to the median if larger."""
    usual = statistics.median(abs(x) for x in expected)
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / max(abs(b), usual) for a, b in pairs)
