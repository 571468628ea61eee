"""A hand-written loop: virtual batches, a scheduler, a run folder, a private model.

    python examples/loop.py [RUN_FOLDER]

Runs on the digits that come with the package, in under half a minute on one core. With
a folder it keeps ledger, journal and checkpoints there; called again with the same
folder it goes on where it stopped.
"""

import sys

import torch
from torch import nn

from curvedp import data, make_private

EPOCHS = 15


def main(run_dir: str | None) -> None:
    digits = data.load("digits")
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),  # not BatchNorm, which mixes examples
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(
        model,
        optimizer,
        digits.train,
        loss=nn.CrossEntropyLoss(),
        epsilon=3.0,
        delta=1e-5,
        batch_size=256,
        epochs=EPOCHS,
        physical_batch_size=64,  # a logical batch comes in about four portions
        run_dir=run_dir,
    )
    steps = private.plan.sampling.steps
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(private.optimizer, T_max=steps)
    scheduler = private.schedule(decay)  # counts logical steps, not portions
    print(f"noise multiplier {private.plan.noise_multiplier}, {steps} steps")

    with private:
        if run_dir is not None:
            stored = private.resume()
            if "scheduler" in stored:
                scheduler.load_state_dict(stored["scheduler"])
        while private.steps_left():
            for x, y in private.loader:  # one pass is one epoch
                private.optimizer.zero_grad()
                private.loss(private.model(x), y).backward()
                private.optimizer.step()
                scheduler.step()
            if run_dir is not None:
                private.save({"scheduler": scheduler.state_dict()})
            # The test digits are held out and public, so their accuracy may be shown.
            # The training loss may not: it is private, and nobody has paid for it.
            correct = accuracy(private.model, digits.test)
            print(f"step {private.step:3d}  test accuracy {correct:.3f}")
        print(private.statement())


def accuracy(model: nn.Module, dataset: data.ArrayDataset) -> float:
    model.eval()
    with torch.no_grad():
        predicted = model(dataset.inputs).argmax(1)
    model.train()
    return (predicted == dataset.targets).float().mean().item()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
