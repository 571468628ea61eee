"""Every whitening that the package builds, on the factors of any net."""

import torch
from nets import loss

from curvedp.barrier import Provenance
from curvedp.curvature import Factors, factors_of
from curvedp.layers import Recording, as_call, cover
from curvedp.whitening import (
    Damping,
    FloorSchedule,
    JointWhitening,
    KroneckerWhitening,
)

WHITENINGS = {
    "a": KroneckerWhitening(rank=None),
    "a-rank-3": KroneckerWhitening(rank=3),
    "a-quarter": KroneckerWhitening(exponent=0.25, damping=Damping(0.01)),
    "g": KroneckerWhitening(side="g", rank=None),
    "both": KroneckerWhitening(side="both", rank=None, damping=Damping(0.02)),
    "both-rank-2": KroneckerWhitening(side="both", rank=2),
    "both-absolute": KroneckerWhitening(
        side="both", rank=None, damping=Damping(1e-3, relative=False)
    ),
    "channel-spatial": KroneckerWhitening(side="both", product=True, rank=None),
    "scaled": KroneckerWhitening(side="both", match_scale=True),
    "joint": JointWhitening(0.3),
    "joint-printed": JointWhitening(0.3, matched=False),
    "joint-scheduled": JointWhitening(0.3, share=FloorSchedule(100).share),
    "diagonal": KroneckerWhitening(diagonal=True),
    "diagonal-quarter": KroneckerWhitening(
        diagonal=True, exponent=0.25, damping=Damping(0.3)
    ),
}


def build(name, factors, parameters, step=0):
    return WHITENINGS[name].build(factors, parameters, step)


def trainable(model):
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def recorded(net, size, seed, keep_inputs=True, dtype=torch.float32):
    """Model, coverage and the layers' values of one batch."""
    model = net.make().to(dtype)
    coverage = cover(model, net.synthesiser(dtype), loss)
    batch = net.batch(size, torch.Generator().manual_seed(seed), dtype)
    return model, coverage, layer_ios(model, coverage, batch, size, keep_inputs)


def layer_ios(model, coverage, batch, size, keep_inputs):
    torch.manual_seed(0)
    recording = Recording(model, coverage.covered, size, keep_inputs=keep_inputs)
    output = recording.forward(*as_call(batch.inputs))
    loss(output, batch.targets).sum().backward()
    return recording.layer_ios()


def factors(ios, sharing="expand"):
    layers = {}
    for io in ios:
        layers |= factors_of(io, sharing)
    return Factors(layers, Provenance.SYNTHETIC)
