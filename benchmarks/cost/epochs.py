"""Some epochs of training as a user writes them: sampling, fetching, steps, curvature.

Examples are random and of the shape of MNIST; time does not depend on their values.
Each round lets every contestant make a stretch of steps, loader included, in an order
that rotates. The time of all epochs is attaching, as many steps as they have at the
median time of a step, and an estimate of curvature every 100 steps.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cost.contestants import CLIP, NOISE, OURS, PLAIN, RATE, WHITENED, clock
from cost.measuring import REFRESH_EVERY
from curvedp import make_private

__all__ = ["run_epochs"]

EXAMPLES = 60_000
STRETCH = 10
RIVALS = ("opacus hooks", "opacus ghost")


def run_epochs(net, epochs, rounds):
    """Seconds of ``epochs`` for each contestant, and ours over those of Opacus."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(EXAMPLES, *net.shape, generator=random)
    data = TensorDataset(x, torch.randint(0, 10, (EXAMPLES,), generator=random))
    steps = epochs * (EXAMPLES // net.batch)
    made, attaching, refresh = {}, {}, {}
    for name in (PLAIN, OURS, WHITENED, *RIVALS):
        start = clock()
        make = _opacus if name in RIVALS else _plain if name == PLAIN else _ours
        made[name], estimate = make(name, net, data, epochs)
        attaching[name] = clock() - start
        if estimate is not None:
            start = clock()
            estimate()
            refresh[name] = clock() - start
    for go_on in made.values():
        go_on(2)  # what is set up at first use
    seconds = {name: [] for name in made}
    names = list(made)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            made[name](STRETCH)
            seconds[name].append((clock() - start) / STRETCH)
    estimates = -(-steps // REFRESH_EVERY)
    whole = {
        name: attaching[name]
        + steps * statistics.median(values)
        + estimates * refresh.get(name, 0.0)
        for name, values in seconds.items()
    }
    return {
        "net": net.name,
        "batch": net.batch,
        "epochs": epochs,
        "examples": EXAMPLES,
        "steps": steps,
        "attach_seconds": attaching,
        "refresh_seconds": refresh,
        "step_seconds": seconds,
        "epochs_seconds": whole,
        "over_opacus": {
            ours: {rival: whole[ours] / whole[rival] for rival in RIVALS}
            for ours in (PLAIN, OURS, WHITENED)
        },
    }


def _plain(_, net, data, epochs):
    """Ordinary training on shuffled batches, for comparison."""
    model = net.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=net.batch, shuffle=True)
    batches = (batch for _ in range(epochs) for batch in loader)

    def go_on(steps):
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return go_on, None


def _ours(name, net, data, epochs):
    model = net.model()
    own = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        data,
        recipe="dp-kfc" if name == WHITENED else "dp-sgd",
        loss="cross-entropy",
        clip_norm=CLIP,
        noise_multiplier=NOISE,
        batch_size=net.batch,
        epochs=epochs,
        physical_batch_size="auto",  # whole batches, as Opacus takes them
        **({} if name == WHITENED else {"clipping": "flat"}),
    )
    batches = iter(own.loader)

    def go_on(steps):
        stop = own.step + steps
        while own.step < stop:
            own.train_on(next(batches))

    whiteners = own._engine.whiteners
    return go_on, (lambda: whiteners.at(0)) if name == WHITENED else None


def _opacus(name, net, data, _):
    from opacus import PrivacyEngine

    mode = name.removeprefix("opacus ")
    model = net.model(for_opacus=True)
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(data, batch_size=net.batch),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=True,
        grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(),
    )
    private, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    batches = iter(loader)

    def go_on(steps):
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()

    return go_on, None
