"""Small federations for tests: clients, a server, and data that can be learnt."""

import torch
from torch.utils.data import TensorDataset

from curvedp.barrier import Relation
from curvedp.federated import Client, FederatedPlan, Federation, Server, Shared, View
from curvedp.layers import Batch
from curvedp.recipes import get_federated_recipe

FEATURES, CLASSES = 12, 3


def network(hidden=0):
    generator = torch.Generator().manual_seed(5)
    layers = [torch.nn.Linear(FEATURES, CLASSES)]
    if hidden:
        layers = [
            torch.nn.Linear(FEATURES, hidden),
            torch.nn.Tanh(),
            torch.nn.Linear(hidden, CLASSES),
        ]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    return model


def records(count, seed):
    """Labels that a linear model can tell."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x @ teacher).argmax(1))


def template():
    return Batch(torch.zeros(1, FEATURES), torch.zeros(1, dtype=torch.long))


class World:
    """A server and its clients in one process.

    Clients share model and whitener unless they are to be ``apart``, as on machines of
    their own.
    """

    def __init__(
        self, sizes=(30, 50, 20), *, recipe="dp-fedgd", view="each-client", rounds=4,
        noise=1e-4, hidden=0, declared=None, folder=None, relation=Relation.ADD_REMOVE,
        server=None, client=None, epsilon=None, delta=1e-3, apart=False,
        **facts,
    ):  # fmt: skip
        self.recipe = get_federated_recipe(recipe)
        settings = {k: facts.pop(k) for k in list(facts) if k in self.settings}
        self.recipe = self.recipe.configure(**settings)
        declared = declared or sizes
        federation = Federation(
            tuple(map(float, declared)), rounds, relation=relation, **facts
        )
        given = {"epsilon": epsilon} if epsilon else {"noise_multiplier": noise}
        self.plan = FederatedPlan.make(
            federation, View.of(view), bound=self.recipe.clip_norm, delta=delta, **given
        )
        self.hidden, self.folder, self.sizes = hidden, folder, sizes
        self.server_options, self.client_options = server or {}, client or {}
        self.data = [records(n, 100 + i) for i, n in enumerate(sizes)]
        self.together = None if apart else self.shared()
        self.clients = {i: self.client(i) for i in range(len(sizes))}
        self.server = self.make_server()

    @property
    def settings(self):
        return ["mode", *self.recipe.setting_names()]

    def shared(self):
        return Shared(
            network(self.hidden), "cross-entropy", self.recipe, self.plan, template()
        )

    def client(self, number, **options):
        folder = None if self.folder is None else self.folder / f"client-{number}"
        options = {"unsafe_reproducible_noise": 7, **self.client_options, **options}
        shared = self.together or self.shared()
        return Client(number, shared, self.data[number], run_dir=folder, **options)

    def make_server(self, **options):
        folder = None if self.folder is None else self.folder / "server"
        options = {"unsafe_reproducible_noise": 9, **self.server_options, **options}
        return Server(self.shared(), run_dir=folder, **options)

    def parameters(self):
        return self.server.shared.copies()
