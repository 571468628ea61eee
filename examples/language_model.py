"""A tiny language model under DP-Adam, on sentences that this script makes up.

    python examples/language_model.py

One example is one sentence. Its loss is the mean over its *own* tokens: a mean over all
tokens of the batch would make one sentence's gradient depend on the length of others.
The data is synthetic and public, so showing its loss is harmless here.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from curvedp import Trainer
from curvedp.train import LOSSES, evaluate

VOCABULARY, LENGTH, PADDING = 24, 12, 0


def sentences(count: int, seed: int) -> TensorDataset:
    """Walks of constant stride through the alphabet, of different lengths."""
    random = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY - 1, (count, 1), generator=random)
    stride = torch.randint(1, 3, (count, 1), generator=random)
    tokens = 1 + (start + stride * torch.arange(LENGTH + 1)) % (VOCABULARY - 1)
    length = torch.randint(6, LENGTH + 1, (count, 1), generator=random)
    past_the_end = torch.arange(LENGTH + 1) > length
    inputs = tokens.masked_fill(past_the_end, PADDING)[:, :-1]
    targets = tokens.masked_fill(past_the_end, -100)[:, 1:]  # -100: no token here
    return TensorDataset(inputs, targets)


class TinyModel(nn.Module):
    """Token and position embeddings, one causal convolution, a linear head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=PADDING)
        self.positions = nn.Embedding(LENGTH, width)
        self.mix = nn.Conv1d(width, width, kernel_size=3)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        past = nn.functional.pad(h.transpose(1, 2), (2, 0))  # never the future
        h = h + self.mix(past).transpose(1, 2).tanh()
        return self.head(self.norm(h))


def main() -> None:
    torch.manual_seed(0)
    model = TinyModel()
    trainer = Trainer(
        model,
        "language-modelling",
        "dp-adam",
        learning_rate=5e-3,
        epsilon=4.0,
        delta=1e-5,
        batch_size=256,
        epochs=10,
    )
    loss = LOSSES["language-modelling"]
    held_out = sentences(500, seed=2)
    before = evaluate(model, held_out, loss, ("loss",))["loss"]
    result = trainer.fit(sentences(4000, seed=1))
    after = evaluate(model, held_out, loss, ("loss",))["loss"]
    print(f"held-out loss {before:.3f} -> {after:.3f} nats per token")
    print(result.statement)


if __name__ == "__main__":
    main()
