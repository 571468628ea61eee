"""Faults in federations: rules 1, 2, 7, 11 and 12 as clients and server keep them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.accounting import GaussianEvent, gaussian, get_accountant
from curvedp.barrier import ClippedSum, Relation
from curvedp.errors import RoundError
from curvedp.federated import (
    Client,
    FederatedPlan,
    Federation,
    Server,
    Shared,
    View,
)
from curvedp.federated.aggregation import mean_of_updates
from curvedp.federated.secure import SumGrid, Total
from curvedp.layers import Batch
from curvedp.noise import LatticeShare, NoiseState, RandomStreams, restore_release

from ..federated.worlds import World
from .checking import refused, working
from .mutate import Fault, Patch


def an_update_has_its_share_of_the_noise():
    """``C s / (sqrt(n) n_i)``, whatever the data."""
    world = World((40,) * 4, rounds=1, noise=200.0, hidden=100)
    release = world.clients[0].answer(world.server.open_round()).release
    measured = float(torch.cat([v.flatten() for v in release.values.values()]).std())
    due = 200.0 / math.sqrt(4) / 40
    assert abs(measured / due - 1) < 0.1, "another share of the noise"


def the_divisor_is_declared():
    updates = []
    for size in (40, 41):
        world = World((size, 30, 30), declared=(40, 30, 30), noise=1e-7)
        data = TensorDataset(torch.full((size, 12), math.nan), torch.zeros(size).long())
        client = Client(0, world.together, data, unsafe_reproducible_noise=3)
        updates.append(client.answer(world.server.open_round()))
    assert updates[0].release.noise_std == updates[1].release.noise_std
    for name, value in updates[0].release.values.items():
        assert torch.equal(value, updates[1].release.values[name]), "the size shows"


def small_clients_count():
    """A record of the smallest moves the mean most; the noise of others is less."""
    facts = Federation((10.0, 1000.0, 1000.0), 5)
    due = 1 / 10 / math.sqrt(1 / 10**2 + 2 / 1000**2)
    seen = facts.seen_noise(View.of("trusted-aggregate"), 1.0)
    assert seen <= 1 / due / math.sqrt(3) * (1 + 1e-9), "noise that is not there"


def colluders_noise_does_not_count():
    facts = Federation((100.0,) * 5, 5)
    view = View.of("trusted-aggregate", colluding=2)
    assert facts.seen_noise(view, 1.0) <= math.sqrt(3 / 5) * (1 + 1e-9)


def replacing_is_twice_as_far():
    exact = get_accountant("gaussian")
    for relation in (Relation.REPLACE_ONE, "replace-one"):
        found = exact.epsilon(GaussianEvent(20.0), relation, 1e-5)
        due = exact.epsilon(GaussianEvent(10.0), Relation.ADD_REMOVE, 1e-5)
        assert abs(found - due) < 1e-6, "a replacement accounted as an addition"


def a_round_is_released_once():
    world = World(noise=1.0)
    task = world.server.open_round()
    first = world.clients[0].answer(task).release.values
    with working():
        again = world.clients[0].answer(task).release.values
    for name, value in first.items():
        assert torch.equal(value, again[name]), "fresh noise for the same round"
    moved = {name: value + 1 for name, value in task.parameters.items()}
    refused(
        RoundError,
        "at other parameters",
        lambda: world.clients[0].answer(replace(task, parameters=moved)),
    )


def no_update_of_a_secure_plan_leaves_singly():
    world = World(
        (30,) * 4, view=View.of("secure-aggregate"), server={"sums_only": True}
    )
    task = world.server.open_round()
    refused(RoundError, "leave singly", lambda: world.clients[0].answer(task))


def a_masked_share_leaves_once():
    world = World(
        (30,) * 4, view=View.of("secure-aggregate"), server={"sums_only": True}
    )
    task = world.server.open_round()
    world.clients[0].masked_answer(task)
    refused(RoundError, "already", lambda: world.clients[0].masked_answer(task))


def too_little_noise_is_left_out():
    world = World(noise=1.0)
    update = world.clients[0].answer(world.server.open_round())
    own = update.release
    bare = restore_release(
        own.values, own.frame, own.step, noise_std=own.noise_std / 10
    )
    reason = world.server.reason_against(replace(update, release=bare))
    assert reason is not None, "noise that is missing is taken"
    assert "noise" in reason


def a_trusted_server_makes_up_for_missing_shares():
    """Three of four are missing: the mean has twice the noise of the one that came."""
    world = World((40,) * 4, view="trusted-aggregate", rounds=1, noise=200.0, hidden=99)
    before = world.parameters()
    update = world.clients[0].answer(world.server.open_round())
    world.server.close_round([update])
    after = world.parameters()
    moved = torch.cat([(before[n] - after[n]).flatten() for n in before])
    single = torch.cat([v.flatten() for v in update.release.values.values()])
    ratio = float(moved.std() / single.std()) / world.recipe.learning_rate
    assert abs(ratio - 2) < 0.2, "noise is missing"


def masks_of_a_client_are_secret():
    plan = FederatedPlan.make(
        Federation((8.0, 8.0), 3), "each-client", bound=1.0, delta=1e-3,
        noise_multiplier=1e-6,
    )  # fmt: skip
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 2))
    template = Batch(torch.zeros(1, 16), torch.zeros(1, dtype=torch.long))
    shared = Shared(model, "cross-entropy", "dp-fedgd", plan, template)
    task = Server(shared).open_round()
    data = TensorDataset(torch.ones(8, 16), torch.zeros(8, dtype=torch.long))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        release = Client(0, shared, data).answer(task).release
        found.append(release.values["1.weight"])
    assert not torch.allclose(*found, atol=1e-4), "dropout follows the public seed"


def noise_of_a_share_has_all_numbers():
    share = LatticeShare(1.0, 1.0, 1.0, 2.0**-25, 1.0, 4000)
    zero = ClippedSum({"w": torch.zeros(4000)}, 1.0, "none", 0)
    streams = RandomStreams(0, unsafe_reproducible_noise=3)
    release, _ = share.update(zero, NoiseState(streams))
    steps = (release.values["w"] * 2.0**25).long()
    far = steps[steps.abs() > 2**25]
    odd = float((far % 2).double().mean())
    assert 0.4 < odd < 0.6, "numbers that never come tell the sum"


def masks_that_did_not_cancel_are_seen():
    world = World(
        (30,) * 4, view=View.of("secure-aggregate"), server={"sums_only": True}
    )
    before = world.parameters()
    task = world.server.open_round()
    updates = tuple(client.masked_answer(task) for client in world.clients.values())
    far = 8 * world.server.grid.half_range
    spoilt = {n: torch.full_like(v, far) for n, v in updates[0].release.values.items()}
    world.server.close_sum(Total(updates, spoilt))
    for name, value in world.parameters().items():
        assert torch.equal(value, before[name]), "the model was moved by masks"


FAULTS = [
    Fault(
        "1 a client that divides by its true size",
        the_divisor_is_declared,
        (
            Patch(
                Client.answer,
                "divisor = self.shared.plan.divisors[self.number]",
                "divisor = float(self._loader._size)",
            ),
        ),
    ),
    Fault(
        "2 a share of the whole noise for each of n",
        an_update_has_its_share_of_the_noise,
        (
            Patch(
                FederatedPlan.share_multiplier,
                "/ math.sqrt(self.federation.clients)",
                "/ self.federation.clients",
            ),
        ),
    ),
    Fault(
        "2 unequal clients accounted as equal ones",
        small_clients_count,
        (
            Patch(
                Federation.seen_noise,
                "share * math.hypot(*hiding) / largest",
                "share * math.sqrt(len(hiding))",
            ),
        ),
    ),
    Fault(
        "2 colluders counted among those who hide",
        colluders_noise_does_not_count,
        (Patch(Federation.seen_noise, "lost = view.colluding", "lost = 0"),),
    ),
    Fault(
        "2 a relation that is text accounted as another",
        replacing_is_twice_as_far,
        (Patch(gaussian._distances, "Relation.parse(relation)", "relation"),),
    ),
    Fault(
        "2 an update with less noise than is due",
        too_little_noise_is_left_out,
        (
            Patch(
                Server.reason_against,
                "not math.isclose(release.noise_std, due, rel_tol=1e-6)",
                "False",
            ),
        ),
    ),
    Fault(
        "2 a trusted server that leaves missing noise missing",
        a_trusted_server_makes_up_for_missing_shares,
        (Patch(mean_of_updates, "if is_trusted(plan) and missing:", "if False:"),),
    ),
    Fault(
        "7 a round with fresh noise for whoever asks again",
        a_round_is_released_once,
        (
            Patch(Client.answer, "self._known(task) or", "None or"),
        ),
    ),
    Fault(
        "7 a masked share in two sums",
        a_masked_share_leaves_once,
        (
            Patch(
                Client.masked_answer, "if self.ledger.next_attempt(task.round):",
                "if False:",
            ),
        ),
    ),
    Fault(
        "7 a share of a secure plan without a mask",
        no_update_of_a_secure_plan_leaves_singly,
        (Patch(Client.answer, "if self.grid is not None:", "if False:"),),
    ),
    Fault(
        "11 dropout of a client from the global generator",
        masks_of_a_client_are_secret,
        (Patch(Client._sum, "torch.manual_seed(secret % 2**63)", "pass"),),
    ),
    Fault(
        "12 shares with noise of float32 normals",
        noise_of_a_share_has_all_numbers,
        (
            Patch(
                RandomStreams.rounded_normals,
                "return rounded_normals(self._noise_words(*at), count, scale)",
                "return (scale * torch.from_numpy(self.generator(Stream.NOISE, *at)"
                ".standard_normal(count, dtype='float32'))).round().int()",
            ),
        ),
    ),
    Fault(
        "12 a sum of masks that did not cancel",
        masks_that_did_not_cancel_are_seen,
        (Patch(SumGrid.could_be, "return all(", "return True or all("),),
    ),
]  # fmt: skip
