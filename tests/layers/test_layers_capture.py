"""What a recorded pass leaves behind: nothing."""

import gc
import weakref

import torch
from torch import nn

from curvedp.layers import Batch, Recording, cover, synthesiser_like


def test_a_pass_leaves_no_cycle_behind():
    # activations would stay until the next collection, in a CUDA graph for good
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5)
    )
    x = torch.randn(3, 1, 4, 4)
    covered = cover(net, synthesiser_like(Batch(x[:1], None), net), None).covered
    gc.collect()
    gc.disable()
    try:
        recording = Recording(net, covered, 3)
        recording.forward((x,), {}).sum().backward()
        recording.layer_ios()
        gone = weakref.ref(recording)
        del recording
        assert gone() is None
    finally:
        gc.enable()
