"""How far two gradients may be apart and still be the same up to rounding.

Two gradients x and y of a parameter agree if

    ``||x - y|| <= r max(||x||, ||y||) + n G``

with G the norm of the whole model's gradient on the same examples. The first term is
for parameters that have a gradient. The second is for those whose gradient is zero
whatever the data: a bias on attention keys (softmax does not see it), a bias before an
InstanceNorm, a bias over tokens before a norm over channels. What is found there are
two different rounding errors of a sum that cancels; relative to each other they are
far apart, relative to G they are nothing (seen: up to 1e-16 G in float64 and 4e-8 G in
float32, with up to 16384 positions).

=========  =====  =====  ============================================================
dtype      r      n      why
=========  =====  =====  ============================================================
float64    1e-5   1e-6   rounding is 1e-16; this leaves room for modules that compute
                         in float32 inside, whatever they are given (RMSNorm, softmax)
float32    2e-3   1e-5   a backward pass of many layers
bfloat16   1e-1   1e-3   autograd adds up some bias gradients in bfloat16
float16    5e-2   1e-3   the same
=========  =====  =====  ============================================================

What could pass although it is there? Let ``tau = r + n sqrt(k)`` with k parameter
tensors: the k deviations together are at most ``tau G``. G is that of the check's three
examples; for one of three alike, the factor is ``t = sqrt(3) tau``.

- *A use of a weight that no rule sees* (``F.linear(h, layer.weight)``), if its part of
  the gradient is below that. The clipped sum is made of what the rules saw, which is
  also what its norm was taken of, so an example still contributes at most C. Only the
  direction is off, by at most t: utility, not privacy.
- *A dependence on another example.* If replacing example j moves the gradient of i by
  at most ``t ||g_i||``, it moves its clipped contribution by at most ``2 t C`` (scale
  both by ``C / max ||.||``: they are ``t C`` apart, and clipping the shorter one again
  moves it by no more than that). With B examples computed together the sum moves by at
  most ``C (1 + 2 t (B - 1))`` in place of C. In float64, r and n are multiplied by
  :data:`COUPLING` here, because the same operations compute the same rows twice: with
  400 tensors t is 5e-8, and a batch of 4096 adds 0.04 % to C. The check runs in float64
  wherever the model does and is not too large (:mod:`curvedp.layers.trial`).

All of this is about inputs like the synthetic ones; the check sees no others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["COUPLING", "NEGLIGIBLE", "TOLERANCE", "close"]

#: r: largest deviation relative to the gradient itself. A wrong attribution is off by
#: about 1.
TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 2e-3,
    torch.bfloat16: 1e-1,
    torch.float16: 5e-2,
}

#: n: what is nothing, relative to the gradient of the whole model.
NEGLIGIBLE = {
    torch.float64: 1e-6,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-3,
    torch.float16: 1e-3,
}

#: Factor on both in float64, where one example must not depend on another.
COUPLING = 1e-3


def close(x: Tensor, y: Tensor, scale: float = 0.0, strictness: float = 1.0) -> bool:
    """Whether two tensors agree up to the rounding of their dtype.

    Args:
        x: one tensor.
        y: the other; the coarser dtype of both decides.
        scale: G, the norm of the whole model's gradient; 0 where there is none.
        strictness: factor on what is allowed.
    """
    if x.shape != y.shape:
        return False
    dtypes = [t.dtype if t.dtype in TOLERANCE else torch.float32 for t in (x, y)]
    x, y = x.detach().double(), y.detach().double()
    own = float(torch.maximum(x.norm(), y.norm()))
    if not math.isfinite(own):
        return False
    relative = max(TOLERANCE[dtype] for dtype in dtypes) * own
    nothing = max(NEGLIGIBLE[dtype] for dtype in dtypes) * scale
    return float((x - y).norm()) <= strictness * (relative + nothing)
