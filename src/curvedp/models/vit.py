"""A vision transformer of plain modules: every weight is used where it lives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvedp.errors import ConfigurationError
from curvedp.models.basic import image_shape

__all__ = ["VisionTransformer", "vit"]

_EMBEDDING_STD = 0.02


class _Attention(nn.Module):
    """Self-attention with a Linear each for queries, keys, values and output.

    ``nn.MultiheadAttention`` uses its weights functionally, out of reach of per-layer
    rules; here each is a module of its own.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        # A bias on the keys shifts all scores of a query alike, and softmax does not
        # see it: its gradient is zero, so it would only ever collect noise.
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            self._per_head(self.query(x)),
            self._per_head(self.key(x)),
            self._per_head(self.value(x)),
        )
        merged: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return merged

    def _per_head(self, x: Tensor) -> Tensor:
        """``[B, T, D] -> [B, heads, T, D / heads]``."""
        batch, tokens, dim = x.shape
        return x.view(batch, tokens, self.heads, dim // self.heads).transpose(1, 2)


class _Block(nn.Module):
    """Attention and a two-layer net, each after a LayerNorm and added to its input."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = _Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, hidden)
        self.contract = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(self.norm1(x))
        hidden = F.gelu(self.expand(self.norm2(attended)))
        refined: Tensor = attended + self.contract(hidden)
        return refined


class VisionTransformer(nn.Module):
    """Pre-norm vision transformer that classifies by its class token.

    Shapes: inputs ``[B, C, H, W]``, tokens ``[B, T + 1, D]`` with
    ``T = (H / patch)(W / patch)``, outputs ``[B, num_outputs]``.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_outputs: int,
        *,
        patch: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        tokens = (height // patch) * (width // patch)
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.zeros(1, tokens + 1, dim))
        nn.init.trunc_normal_(self.class_token, std=_EMBEDDING_STD)
        nn.init.trunc_normal_(self.position, std=_EMBEDDING_STD)
        self.blocks = nn.Sequential(*(_Block(dim, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Classify a batch of images."""
        patches = self.embed(self._cut(images))
        first = self.class_token.expand(len(images), -1, -1)
        tokens = torch.cat([first, patches], dim=1) + self.position
        # Only the class token is read; normalising the others would be thrown away.
        outputs: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return outputs

    def _cut(self, images: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, T, C patch patch]`` without a copy per patch."""
        side = self.patch
        cut = images.unfold(2, side, side).unfold(3, side, side)
        return cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def vit(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    patch: int = 4,
    dim: int = 192,
    depth: int = 6,
    heads: int = 3,
    mlp_ratio: float = 4.0,
) -> nn.Module:
    """A vision transformer (Dosovitskiy et al. 2021) for small images, no dropout.

    Args:
        input_shape: ``[channels, height, width]``; sides are multiples of ``patch``.
        num_outputs: Outputs of the last layer.
        patch: Side of a patch.
        dim: Width of a token, a multiple of ``heads``.
        depth: Number of blocks.
        heads: Attention heads.
        mlp_ratio: Hidden width of a block over ``dim``.

    Raises:
        ConfigurationError: If a setting is not positive or does not divide.
    """
    hidden = int(dim * mlp_ratio)
    for name, value in (
        ("patch", patch),
        ("dim", dim),
        ("depth", depth),
        ("heads", heads),
        ("dim * mlp_ratio", hidden),
    ):
        if value < 1:
            raise ConfigurationError(f"{name} is {value}", "use 1 or more")
    shape = image_shape("vit", input_shape, patch)
    if shape[1] % patch or shape[2] % patch:
        raise ConfigurationError(
            f"images of {shape[1]}x{shape[2]} cannot be cut into patches of {patch}",
            "choose a patch that divides both sides",
        )
    if dim % heads:
        raise ConfigurationError(
            f"dim {dim} is not a multiple of heads {heads}", "choose another number"
        )
    return VisionTransformer(
        shape,
        num_outputs,
        patch=patch,
        dim=dim,
        depth=depth,
        heads=heads,
        hidden=hidden,
    )
