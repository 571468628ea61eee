"""The mathematics of a round: clients, mean, whitening and transforms, no network."""

import math
import os

import pytest
import torch

from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, RoundError
from curvedp.experiments.federations import serve
from curvedp.federated import Unit
from curvedp.federated.rounds import asking, run_rounds
from curvedp.recipes import FEDERATED_RECIPES, get_recipe
from curvedp.train import evaluate
from curvedp.train.losses import cross_entropy

from .worlds import World, network, records

#: Contributions are shortened by what sums may round, some 1e-5 of the bound.
NEARLY = {"rtol": 2e-4, "atol": 1e-5}


def rows(dataset):
    return dataset.tensors


def clipped_mean(model, dataset, bound, divisor):
    """By definition: one example at a time, in float64."""
    x, y = rows(dataset)
    summed = {}
    for i in range(len(x)):
        model.zero_grad()
        cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum().backward()
        grads = {n: p.grad.double().clone() for n, p in model.named_parameters()}
        length = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        factor = min(1.0, bound / length)
        for n, g in grads.items():
            summed[n] = summed.get(n, 0.0) + factor * g
    return {n: s / divisor for n, s in summed.items()}


def test_an_update_is_the_clipped_mean_over_the_declared_size():
    world = World((30, 50, 20), declared=(28, 55, 20), noise=1e-6, clip_norm=0.7)
    task = world.server.open_round()
    for i, client in world.clients.items():
        found = client.answer(task).release.values
        declared = world.plan.federation.sizes[i]
        expected = clipped_mean(network(), world.data[i], 0.7, declared)
        for name, value in found.items():
            torch.testing.assert_close(value.double(), expected[name], **NEARLY)


def test_the_server_steps_by_the_mean_of_unequal_clients():
    world = World((30, 50, 20), noise=1e-6, clip_norm=0.7, learning_rate=0.5, rounds=2)
    before = world.parameters()
    run_rounds(world.server, asking(world.clients), rounds=1)
    parts = [clipped_mean(network(), d, 0.7, len(d)) for d in world.data]
    for name, after in world.parameters().items():
        mean = sum(part[name] for part in parts) / 3
        torch.testing.assert_close(
            after.double(), before[name].double() - 0.5 * mean, **NEARLY
        )


def test_physical_batches_do_not_matter():
    world = World((50, 50), noise=1e-6)
    task = world.server.open_round()
    whole = world.client(0, physical_batch_size=64).answer(task)
    parts = world.client(0, physical_batch_size=7).answer(task)
    for name, value in whole.release.values.items():
        torch.testing.assert_close(value, parts.release.values[name], **NEARLY)


def test_a_client_adds_its_share_of_the_noise():
    n, s, declared = 4, 8.0, 40.0
    world = World((40,) * n, noise=s, hidden=400, clip_norm=2.0)
    quiet = World((40,) * n, noise=1e-6, hidden=400, clip_norm=2.0)
    noises = []
    for i in range(n):
        loud = world.clients[i].answer(world.server.open_round()).release
        base = quiet.clients[i].answer(quiet.server.open_round()).release
        noises.append(torch.cat([(v - base.values[k]).reshape(-1)
                                 for k, v in loud.values.items()]))  # fmt: skip
        due = 2.0 * s / math.sqrt(n) / declared
        assert loud.noise_std == pytest.approx(due)
        assert float(noises[-1].std()) == pytest.approx(due, rel=0.05)
    # and no two clients the same
    together = torch.corrcoef(torch.stack(noises)) - torch.eye(n)
    assert float(together.abs().max()) < 0.1


def test_the_mean_knows_how_much_noise_is_in_it():
    sizes, s = (30, 60, 20), 5.0
    world = World(sizes, noise=s, recipe="dp-fedadambc", rounds=1)
    updates = asking(world.clients)(world.server.open_round(), range(3))
    accepted = {u.client: u for u in updates}
    share = s / math.sqrt(3)
    expected = math.hypot(*(share / n for n in sizes)) / 3
    assert world.server._mean(accepted).noise_std == pytest.approx(expected)


def test_a_trusted_aggregator_makes_up_for_missing_shares():
    sizes, s = (30, 60, 20), 5.0
    world = World(sizes, noise=s, view="trusted-aggregate", rounds=1, hidden=400)
    updates = asking(world.clients)(world.server.open_round(), [0, 2])
    mean = world.server._mean({u.client: u for u in updates})
    everybody = math.hypot(*(s / math.sqrt(3) / n for n in sizes))
    assert mean.noise_std == pytest.approx(everybody / 2)
    plain = sum(torch.cat([v.reshape(-1) for v in u.release.values.values()])
                for u in updates) / 2  # fmt: skip
    added = torch.cat([v.reshape(-1) for v in mean.values.values()]) - plain
    assert float(added.std()) == pytest.approx(s / math.sqrt(3) / 60 / 2, rel=0.05)


def test_a_server_that_sees_each_client_adds_nothing():
    world = World((30, 60), noise=5.0, rounds=1)
    (update,) = asking(world.clients)(world.server.open_round(), [1])
    mean = world.server._mean({1: update})
    for name, value in update.release.values.items():
        torch.testing.assert_close(mean.values[name], value)


# -- whitening ------------------------------------------------------------------------

KFC = {
    "recipe": "dp-fedkfc",
    "hidden": 8,
    "refresh": 2,
    "probe_size": 64,
    "apart": True,
}


def test_every_client_rebuilds_the_same_whitener():
    world = World((30, 50, 20), noise=1e-6, rounds=5, **KFC)
    frames = []

    def ask(task, asked):
        updates = asking(world.clients)(task, asked)
        frames.append({u.release.frame for u in updates})
        return updates

    run_rounds(world.server, ask)
    assert [len(f) for f in frames] == [1] * 5
    assert frames[0] == frames[1] != frames[2] == frames[3] != frames[4]


def test_a_client_that_was_away_rebuilds_the_whitener_too():
    world = World((30, 50, 20), noise=1e-6, rounds=5, **KFC)
    run_rounds(world.server, asking({0: world.clients[0]}), rounds=3)
    task = world.server.open_round()  # round 3, whose whitener is of round 2
    assert task.whitened_at
    present, late = world.clients[0].answer(task), world.clients[2].answer(task)
    assert present.release.frame == late.release.frame == world.server._frame()
    assert world.server.reason_against(late) is None


def test_whitened_rounds_are_those_of_one_dataset():
    """With equal sizes, clients together take the step of dp-kfc on all records."""
    world = World(
        (40, 40), noise=1e-6, rounds=1, momentum=0.0, learning_rate=0.3, **KFC
    )
    before = world.parameters()
    whole = World(
        (80, 80), noise=1e-6, rounds=1, momentum=0.0, learning_rate=0.3, **KFC
    )
    x, y = zip(*(rows(d) for d in world.data), strict=True)
    both = torch.utils.data.TensorDataset(torch.cat(x), torch.cat(y))
    whole.data = [both, both]
    run_rounds(world.server, asking(world.clients))
    run_rounds(whole.server, asking({0: whole.client(0)}))
    for name, after in world.parameters().items():
        torch.testing.assert_close(after, whole.parameters()[name], **NEARLY)
        assert not torch.allclose(after, before[name])


@pytest.mark.parametrize("sizes", [(60, 60), (30, 90)])
def test_whitened_updates_are_clipped_in_the_whitened_frame(sizes):
    world = World(sizes, noise=1e-6, clip_norm=0.01, clipping="flat", **KFC)
    for client in world.clients.values():
        release = client.answer(world.server.open_round()).release
        length = math.sqrt(
            sum(float(v.square().sum()) for v in release.values.values())
        )
        assert length <= 0.01 * (1 + 1e-3)


def test_fednew_maps_the_noisy_mean_and_clients_need_no_map():
    settings = {"noise": 1e-6, "learning_rate": 0.3, "rounds": 3, "hidden": 8}
    world = World((40, 60), recipe="dp-fednew", probe_size=64, **settings)
    plain = World((40, 60), recipe="dp-fedgd", **settings)
    task = world.server.open_round()
    assert not task.whitened_at
    updates = asking(world.clients)(task, [0, 1])
    for own, other in zip(
        updates, asking(plain.clients)(plain.server.open_round(), [0, 1]), strict=True
    ):
        for name, value in own.release.values.items():
            torch.testing.assert_close(value, other.release.values[name], **NEARLY)
    before = world.parameters()
    mean = {n: (v + updates[1].release.values[n]) / 2
            for n, v in updates[0].release.values.items()}  # fmt: skip
    whitener = world.server.shared.whiteners.at(0)
    world.server.close_round(updates)
    for name, mapped in whitener.apply(mean).items():
        moved = before[name] - world.parameters()[name]
        torch.testing.assert_close(moved, 0.3 * mapped.float(), **NEARLY)
        assert not torch.allclose(mapped.float(), mean[name], rtol=0.05)
    run_rounds(world.server, asking(world.clients))  # and on through the others


# -- clients that have nothing --------------------------------------------------------


def none_of(world, number):
    """The client of that number, without records."""
    world.data[number] = records(0, 1)
    return world.client(number)


@pytest.mark.parametrize("unit", list(Unit))
def test_a_client_without_records_answers_with_noise(unit):
    """That it has none is private: under add-remove, one record less may be none."""
    whole = unit is Unit.CLIENT
    world = World(
        (30, 50, 20), noise=5.0, hidden=400, unit=unit, relation=Relation.ZERO_OUT,
        client={"records_per_round": 64} if whole else {},
    )  # fmt: skip
    update = none_of(world, 1).answer(world.server.open_round())
    assert world.server.reason_against(update) is None
    values = torch.cat([v.reshape(-1) for v in update.release.values.values()])
    due = 5.0 / math.sqrt(3) / world.plan.divisors[1]
    assert float(values.std()) == pytest.approx(due, rel=0.05)
    assert abs(float(values.mean())) < due / 10


def test_a_client_that_draws_nobody_answers_with_noise():
    world = World((30, 50, 20), noise=5.0, record_rate=1e-9, hidden=400)
    update = world.clients[1].answer(world.server.open_round())
    assert world.server.reason_against(update) is None
    values = torch.cat([v.reshape(-1) for v in update.release.values.values()])
    due = 5.0 / math.sqrt(3) / world.plan.divisors[1]
    assert float(values.std()) == pytest.approx(due, rel=0.05)


# -- units, sampling ------------------------------------------------------------------


def test_the_client_as_the_unit_is_clipped_as_a_whole():
    world = World(
        (30, 50, 20), noise=1e-6, unit=Unit.CLIENT, relation=Relation.ZERO_OUT,
        clip_norm=0.5, client={"records_per_round": 64},
    )  # fmt: skip
    for i, client in world.clients.items():
        release = client.answer(world.server.open_round()).release
        model, (x, y) = network(), rows(world.data[i])
        cross_entropy(model(x), y).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        length = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        assert length > 0.5
        for name, value in release.values.items():
            torch.testing.assert_close(value, grads[name] * 0.5 / length, **NEARLY)


def test_records_are_drawn_anew_in_every_round():
    world = World((200, 200), noise=1e-6, record_rate=0.3, learning_rate=0.0, rounds=3)
    updates = []
    for _ in range(2):
        task = world.server.open_round()
        found = asking(world.clients)(task, [0, 1])
        updates.append(found[0].release.values["0.weight"])
        world.server.close_round(found)
    assert not torch.allclose(*updates)  # same parameters, other records
    assert world.plan.divisors == (60.0, 60.0)


def test_drawn_clients_are_drawn_once_for_a_round(tmp_path):
    world = World((20,) * 25, rounds=3, client_rate=0.4, folder=tmp_path,
                  server={"unsafe_reproducible_noise": None})  # fmt: skip
    world.server.open_round()
    drawn = world.server.participants()
    assert 1 < len(drawn) < 24
    if os.name == "posix":
        assert (tmp_path / "server/drawn.json").stat().st_mode & 0o077 == 0
    world.server.close()
    again = world.make_server()
    assert again.participants() == drawn
    world.server = again
    run_rounds(again, asking(world.clients), rounds=1)
    assert not (tmp_path / "server" / "drawn.json").exists()  # a closed round's secret
    run_rounds(again, asking(world.clients))
    assert not (tmp_path / "server" / "drawn.json").exists()
    again.close()


def test_nobody_drawn_is_a_round_of_noise():
    world = World(
        (20,) * 10, noise=3.0, rounds=2, unit=Unit.CLIENT, client_rate=0.01,
        view="trusted-aggregate", client={"records_per_round": 32}, delta=1e-2,
    )  # fmt: skip
    task = world.server.open_round()
    before = {n: v.clone() for n, v in task.parameters.items()}
    report = world.server.close_round([])
    assert report.accepted == ()
    assert not torch.equal(before["0.weight"], world.parameters()["0.weight"])


@pytest.mark.parametrize("least", [1, 3])
def test_nobody_drawn_moves_nothing_where_the_draw_is_seen(tmp_path, least):
    """Drawn once for a round: to wait for more clients would be to wait for ever."""
    world = World((20,) * 3, noise=3.0, rounds=2, client_rate=1e-6,
                  folder=tmp_path, server={"least_clients": least})  # fmt: skip
    before = {n: v.clone() for n, v in world.parameters().items()}
    run_rounds(world.server, asking(world.clients))
    assert world.server.round == 2
    assert all(torch.equal(before[n], v) for n, v in world.parameters().items())
    world.server.close()


def test_an_update_of_a_client_that_was_not_drawn_is_left_out():
    """The price of a round rests on the draw."""
    world = World((20,) * 12, rounds=1, client_rate=0.3, view="trusted-aggregate")
    task, drawn = world.server.open_round(), world.server.participants()
    assert 1 < len(drawn) < 12
    report = world.server.close_round(asking(world.clients)(task, range(12)))
    assert report.accepted == tuple(drawn)
    assert set(report.refused.values()) == {"it was not drawn for this round"}


def test_a_small_draw_still_needs_everybody_who_was_drawn():
    world = World((20,) * 12, rounds=1, client_rate=0.3, server={"least_clients": 12})
    task = world.server.open_round()
    drawn = world.server.participants()
    assert 1 < len(drawn) < 12
    updates = asking(world.clients)(task, drawn)
    with pytest.raises(RoundError, match=f"{len(drawn)} are needed"):
        world.server.close_round(updates[1:])
    assert world.server.close_round(updates).accepted == tuple(drawn)


@pytest.mark.parametrize("unit", list(Unit))
def test_the_number_of_clients_is_not_told_where_the_draw_is_secret(unit):
    secret = unit is Unit.CLIENT
    world = World(
        (20,) * 6, noise=3.0, rounds=2, unit=unit, client_rate=0.5, delta=1e-3,
        view="trusted-aggregate" if secret else "each-client",
        client={"records_per_round": 32} if secret else {},
    )  # fmt: skip
    told = []
    made = serve(world.server, asking(world.clients), None, on_round=told.append)
    assert made.rows == told and len(told) == 2
    assert all(("clients" in row) != secret for row in told)


def test_where_the_draw_is_secret_the_divisor_is_the_expected_number():
    world = World(
        (20,) * 10, noise=1e-6, rounds=2, unit=Unit.CLIENT, client_rate=0.4,
        view="trusted-aggregate", client={"records_per_round": 32}, delta=1e-2,
    )  # fmt: skip
    updates = asking(world.clients)(world.server.open_round(), [3, 5])
    mean = world.server._mean({u.client: u for u in updates})
    both = sum(u.release.values["0.bias"] for u in updates)
    torch.testing.assert_close(mean.values["0.bias"], both / 4, **NEARLY)


def test_the_noise_that_is_told_is_the_same_whoever_was_drawn():
    world = World(
        (20,) * 7, noise=3.7, rounds=9, unit=Unit.CLIENT, client_rate=0.4,
        view="trusted-aggregate", client={"records_per_round": 32}, delta=1e-2,
    )  # fmt: skip
    updates = asking(world.clients)(world.server.open_round(), range(7))
    told = {
        world.make_server()._mean({u.client: u for u in updates[:drawn]}).noise_std
        for drawn in range(8)
    }
    assert len(told) == 1
    assert told.pop() == pytest.approx(3.7 / (0.4 * 7))


# -- recipes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEDERATED_RECIPES)
@pytest.mark.parametrize("mode", ["default", "other"])
def test_every_recipe_learns(name, mode):
    modes = list(FEDERATED_RECIPES[name].modes)
    if mode == "other" and not modes:
        pytest.skip("it has one mode")
    for own in modes if mode == "other" else [None]:
        world = World(
            (150, 150, 100), recipe=name, mode=own, rounds=40, noise=10.0, hidden=0,
            clip_norm=1.0,
        )  # fmt: skip
        held_out = records(400, 999)
        start = evaluate(world.server.shared.model, held_out, cross_entropy)
        run_rounds(world.server, asking(world.clients))
        end = evaluate(world.server.shared.model, held_out, cross_entropy)
        assert end["accuracy"] > max(0.6, start["accuracy"] + 0.1), (own, start, end)


def test_federated_recipes_are_not_for_one_dataset_and_the_other_way_round():
    with pytest.raises(ConfigurationError, match="federated simulate"):
        get_recipe("dp-fedgd")
    with pytest.raises(ConfigurationError, match="dp-fedsofim"):
        World(recipe="dp-sgd")
    with pytest.raises(ConfigurationError, match="not for a federation"):
        World(recipe=get_recipe("dp-sgd"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clipping": "adaptive"}, "adaptive clipping"),
        ({"recipe": "dp-fedkfc", "probe": "oracle"}, "cannot agree"),
        ({"recipe": "dp-fedkfc", "decay": 0.5}, "moving average"),
        ({"view": "secure-aggregate"}, "sees sums alone"),
    ],
)
def test_what_clients_cannot_do_together_is_refused(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        World(**settings)
