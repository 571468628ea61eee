"""What a hostile reader found, and what keeps it out."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.accounting import GaussianEvent, get_accountant
from curvedp.barrier import ClippedSum, Relation
from curvedp.errors import ConfigurationError, CouplingError, RoundError
from curvedp.federated import (
    Client,
    FederatedPlan,
    Federation,
    Observer,
    Server,
    Shared,
    Unit,
    View,
)
from curvedp.federated.flower import FlowerAsk, client_number
from curvedp.federated.in_process import in_process_grid
from curvedp.federated.rounds import asking, run_rounds
from curvedp.federated.secure import Total
from curvedp.layers import Batch
from curvedp.noise import LatticeShare, NoiseState, RandomStreams, restore_release

from .worlds import World

# -- noise of shares -------------------------------------------------------------------


def test_every_whole_number_can_be_the_noise_of_a_share():
    """Of float32 normals above 1, none but multiples of 4 would come on this grid."""
    spacing = 2.0**-25
    share = LatticeShare(1.0, 1.0, 1.0, spacing, 1.0, 50_000)
    assert share.noise_std / spacing > 2**24
    zero = ClippedSum({"w": torch.zeros(50_000)}, 1.0, "none", 0)
    streams = RandomStreams(0, unsafe_reproducible_noise=3)
    release, _ = share.update(zero, NoiseState(streams))
    steps = (release.values["w"] / spacing).long()
    assert torch.equal(steps.double() * spacing, release.values["w"])
    far = steps[steps.abs() > share.noise_std / spacing]
    for modulus in (2, 4, 8):
        counts = torch.bincount(far % modulus, minlength=modulus) / len(far)
        assert torch.allclose(counts, torch.tensor(1 / modulus), atol=0.02)


# -- randomness of the forward pass ----------------------------------------------------


def dropout_client(number, shared):
    x = torch.ones(8, 4)
    data = TensorDataset(x, torch.zeros(8, dtype=torch.long))
    return Client(number, shared, data)


def test_dropout_of_a_client_is_not_that_of_a_public_seed():
    """Masks belong to rows; whoever knows them sees rows move with a missing record."""
    plan = FederatedPlan.make(
        Federation((8.0, 8.0), 3), "each-client", bound=1.0, delta=1e-3,
        noise_multiplier=1e-6,
    )  # fmt: skip
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
    template = Batch(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))
    shared = Shared(model, "cross-entropy", "dp-fedgd", plan, template)
    task = Server(shared).open_round()
    found = []
    for _ in range(4):
        client = dropout_client(0, shared)
        torch.manual_seed(0)
        before = torch.random.get_rng_state()
        found.append(client.answer(task).release.values["1.weight"])
        assert torch.equal(before, torch.random.get_rng_state())  # left alone
    assert any(not torch.allclose(found[0], other, atol=1e-4) for other in found[1:])


# -- text where a name of ours belongs -------------------------------------------------


def test_relation_unit_and_observer_may_be_text_and_cost_the_same():
    noise = {"bound": 1.0, "delta": 1e-5, "noise_multiplier": 60.0}
    sizes = (2500.0,) * 20
    named = Federation(sizes, 70, relation=Relation.REPLACE_ONE)
    text = Federation(sizes, 70, relation="replace-one", unit="record")
    assert text == named
    assert text.unit is Unit.RECORD
    costs = [FederatedPlan.make(f, "each-client", **noise) for f in (named, text)]
    assert costs[0].epsilon() == costs[1].epsilon() > 4
    assert View("each-client") == View.of("each-client")
    assert View("each-client").observer is Observer.EACH_CLIENT
    event = GaussianEvent(10.0)
    exact = get_accountant("gaussian")
    assert exact.epsilon(event, "replace-one", 1e-5) == exact.epsilon(
        event, Relation.REPLACE_ONE, 1e-5
    )


def test_unknown_text_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="'swap-one'"):
        Federation((10.0,), 1, relation="swap-one")
    with pytest.raises(ConfigurationError, match="unknown unit 'person'"):
        Federation((10.0,), 1, unit="person")
    with pytest.raises(ConfigurationError, match="unknown view 'nobody'"):
        View("nobody")
    with pytest.raises(ConfigurationError, match="dropouts is -1"):
        View.of("secure-aggregate", dropouts=-1)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_an_epsilon_that_is_none_is_refused(epsilon):
    with pytest.raises(ConfigurationError, match="epsilon is"):
        FederatedPlan.make(
            Federation((10.0,), 1), "each-client", bound=1.0, delta=1e-3,
            epsilon=epsilon,
        )  # fmt: skip


# -- rounds that move nothing ----------------------------------------------------------


def summed(world, task):
    updates = [client.masked_answer(task) for client in world.clients.values()]
    names = updates[0].release.values
    total = {n: sum(u.release.values[n] for u in updates) for n in names}
    return Total(tuple(updates), total)


def test_a_lost_round_leaves_its_map_to_the_later_ones(tmp_path):
    world = World(
        recipe="dp-fednew", view=View.of("secure-aggregate"), noise=1.0,
        folder=tmp_path, server={"sums_only": True}, probe_size=32,
    )  # fmt: skip
    world.server.open_round()
    world.server.close_sum(Total(reason="lost"))
    world.server.close()
    server = world.make_server()  # from the checkpoint of that round
    for _ in range(3):
        report = server.close_sum(summed(world, server.open_round()))
        assert report.accepted == (0, 1, 2)
    assert server.rounds_left == 0


def test_a_round_that_was_given_up_leaves_its_map_too(tmp_path, monkeypatch):
    world = World(
        recipe="dp-fedkfc", view="trusted-aggregate", rounds=6, noise=1.0,
        folder=tmp_path, hidden=4, refresh=2, probe_size=32,
    )  # fmt: skip
    server = world.server
    run_rounds(server, asking(world.clients), rounds=2)
    updates = [c.answer(task) for task in [server.open_round()]
               for c in world.clients.values()]  # fmt: skip

    def killed(release):
        raise KeyboardInterrupt

    # after the payment for round 3, before the mean of round 2 is stored
    monkeypatch.setattr(server._files, "keep", killed)
    with pytest.raises(KeyboardInterrupt):
        server.close_round(updates)
    server.close()
    server = world.make_server()
    assert server.round == 3
    made = []
    run_rounds(server, asking(world.clients), on_round=made.append)
    assert [r.accepted for r in made] == [(0, 1, 2)] * 3


def test_three_clients_go_on_as_two_where_one_may_be_missing():
    pytest.importorskip("flwr.app")
    pytest.importorskip("cryptography")
    from curvedp.federated.secagg import carried, make_secure_client_app

    world = World(
        (30, 30, 30), view=View.of("secure-aggregate", dropouts=1), rounds=2,
        server={"sums_only": True},
    )  # fmt: skip
    app = make_secure_client_app(lambda c: world.clients[client_number(c)])
    ask = FlowerAsk(in_process_grid(app, 2), wait_for=2, patience=0.1)
    made = []
    run_rounds(world.server, carried(ask, world.server), on_round=made.append)
    assert [r.accepted for r in made] == [(0, 1)] * 2


# -- how many there must be ------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 4])
def test_more_clients_than_there_are_cannot_be_needed(least):
    """Under masks every round would be lost, and paid for."""
    with pytest.raises(ConfigurationError, match="at least, and the plan has 3"):
        World(server={"least_clients": least})


def test_rounds_of_a_secret_draw_say_in_the_log_that_nobody_answered(caplog):
    world = World(
        (30,) * 5, view="trusted-aggregate", unit=Unit.CLIENT, client_rate=0.9,
        delta=1e-2, noise=1.0, rounds=1, client={"records_per_round": 30},
        server={"least_clients": 3},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        run_rounds(world.server, lambda task, asked: [])
    assert [r.getMessage() for r in caplog.records] == [
        "round 0 is made of fewer clients than it should have"  # and not of how many
    ]


# -- values that cannot be added up ----------------------------------------------------


def test_updates_that_add_up_to_infinity_are_left_out():
    world = World((30,) * 3, rounds=3, noise=1.0)
    updates = [c.answer(t) for t in [world.server.open_round()]
               for c in world.clients.values()]  # fmt: skip

    def huge(update):
        release = update.release
        values = {n: torch.full_like(v, 3e38) for n, v in release.values.items()}
        grown = restore_release(
            values, release.frame, release.step, noise_std=release.noise_std
        )
        return replace(update, release=grown)

    report = world.server.close_round([updates[0], huge(updates[1]), huge(updates[2])])
    assert report.accepted == (0,)
    assert "too large" in report.refused[1]
    for value in world.parameters().values():
        assert bool(torch.isfinite(value).all())


@pytest.mark.parametrize("other", [True, 1.0, "1", None, -1])
def test_a_round_is_a_whole_number(other):
    """``True`` is 1 to Python, and was a second name of round 1."""
    world = World(rounds=3)
    task = world.server.open_round()
    with pytest.raises(RoundError, match="not in the plan"):
        world.clients[0].answer(replace(task, round=other))
    assert world.clients[0].ledger.count() == 0


# -- state -----------------------------------------------------------------------------


def test_a_client_keeps_nothing_of_its_records_in_the_model():
    world = World()
    client, layer = world.clients[0], world.together.model[0]
    own = layer.forward

    def keeping(x):
        layer.weight.data[0] += 0 * x.sum()  # what is not written is no write
        layer.last = x.mean(0)
        return own(x)

    layer.forward = keeping
    with pytest.raises(CouplingError, match=r"'0\.last' changed"):
        client.answer(world.server.open_round())
    assert not hasattr(layer, "last")
    assert client.ledger.count() == 0
