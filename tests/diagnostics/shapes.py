"""Sizes that all architectures of these tests have."""

import torch

VOCABULARY, WIDTH, TOKENS = 13, 8, 6


def tokens():
    return torch.zeros(2, TOKENS, dtype=torch.long)
