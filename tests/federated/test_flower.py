"""The same rounds through Flower's apps and records."""

import pytest
import torch

from curvedp.errors import ConfigurationError, DataError, RoundError, StorageError
from curvedp.federated.flower import (
    FlowerAsk,
    client_number,
    make_client_app,
    make_server_app,
    task_from_records,
    task_to_records,
    update_from_records,
    update_to_records,
)
from curvedp.federated.in_process import in_process_grid
from curvedp.federated.rounds import asking, run_rounds

from .worlds import World

flower = pytest.importorskip("flwr.app")


def apps(world, spoil=None, **options):
    def make_client(context):
        return world.clients[client_number(context)]

    refusals = []

    def main(ask, context):
        run_rounds(world.server, ask)

    server_app = make_server_app(
        main, on_refusal=lambda c, why: refusals.append((c, why)), **options
    )
    return make_client_app(make_client), server_app, refusals


def play(world, **options):
    client_app, server_app, refusals = apps(world, **options)
    server_app(in_process_grid(client_app, len(world.sizes)), None)
    return refusals


@pytest.mark.parametrize("recipe", ["dp-fedsofim", "dp-fedkfc"])
def test_rounds_through_flower_are_the_rounds(recipe):
    settings = {"recipe": recipe, "rounds": 3, "noise": 2.0, "hidden": 4}
    if recipe == "dp-fedkfc":
        settings |= {"refresh": 2, "probe_size": 32}
    carried, direct = World(**settings), World(**settings)
    assert play(carried) == []
    run_rounds(direct.server, asking(direct.clients))
    # the run's random name is in no number
    for name, value in carried.parameters().items():
        assert torch.equal(value, direct.parameters()[name])
    assert carried.server.ledger.count() == 3


def test_records_hold_all_of_a_task_and_of_an_update():
    world = World(recipe="dp-fedkfc", hidden=4, rounds=3, refresh=2, probe_size=32)
    task = world.server.open_round()
    assert task_from_records(task_to_records(task)).digest() == task.digest()
    update = world.clients[0].answer(task)
    again = update_from_records(update_to_records(update))
    assert (again.client, again.run_id, again.agreement) == (
        update.client,
        update.run_id,
        update.agreement,
    )
    assert again.release.frame == update.release.frame
    assert again.release.noise_std == update.release.noise_std
    for name, value in update.release.values.items():
        assert torch.equal(value, again.release.values[name])


def test_nothing_but_the_noisy_update_and_declared_facts_leaves():
    world = World(rounds=1, noise=2.0)
    records = update_to_records(world.clients[0].answer(world.server.open_round()))
    facts = dict(records.config_records["facts"])
    assert set(facts) == {
        "client", "run_id", "agreement", "frame", "round", "noise_std"
    }  # fmt: skip
    assert set(records.array_records) == {"values"}
    assert not list(records.metric_records)


def test_a_refusal_travels_as_a_reason():
    world = World(rounds=2, server={"least_clients": 2})
    other = World(rounds=2, noise=3.0)  # another plan
    world.clients[1] = other.clients[1]
    refusals = play(world)
    assert {c for c, _ in refusals} == {1}
    assert "another plan" in refusals[0][1]
    assert world.server.rounds_left == 0


@pytest.mark.parametrize(
    "error",
    [
        DataError("row 7: age is 203"),
        ConfigurationError("the folder of Ms Smith"),
        StorageError("no room beside record 12"),
        ValueError("record 12 is odd"),
        KeyError("Ms Smith"),
    ],
)
def test_what_a_record_may_have_caused_is_not_told_to_the_server(error, caplog):
    world = World(rounds=1, server={"least_clients": 2})

    class Failing:
        def answer(self, task):
            raise error

        def close(self):
            pass

    world.clients[1] = Failing()
    assert play(world) == [(1, "it cannot answer; its own log says why")]
    assert str(error) in caplog.text  # the client's own log
    assert world.server.rounds_left == 0


def test_a_client_that_cannot_be_made_is_a_refusal_without_a_reason():
    world = World(rounds=1, server={"least_clients": 2})

    def make_client(context):
        if client_number(context) == 1:
            raise DataError("row 7: age is 203")
        return world.clients[client_number(context)]

    grid = in_process_grid(make_client_app(make_client), 3)
    seen = []
    ask = FlowerAsk(grid, on_refusal=lambda c, why: seen.append((c, why)))
    run_rounds(world.server, ask)
    assert seen == [(1, "it cannot answer; its own log says why")]


def test_a_node_that_does_not_know_its_number_says_no_more():
    world = World(rounds=1)
    client_app, _, _ = apps(world)
    in_process_grid(client_app, 1)  # Flower makes messages in a run alone
    context = flower.Context(run_id=1, node_id=1, node_config={},
                             state=flower.RecordDict(), run_config={})  # fmt: skip
    message = flower.Message(flower.RecordDict(), 1, "query")
    facts = client_app(message, context).content.config_records["facts"]
    assert facts["refused"] == "the node config does not say which client this is"


def test_a_node_that_lies_about_its_number_is_not_counted():
    world = World(rounds=1)
    world.clients[2] = world.clients[1]
    refusals = play(world)
    assert (2, "it says that it is client 1") in refusals


def test_a_message_of_another_application_is_refused():
    with pytest.raises(RoundError, match="not one of this application"):
        update_from_records(flower.RecordDict())
    with pytest.raises(RoundError, match="does not say"):
        update_from_records(
            flower.RecordDict({"facts": flower.ConfigRecord({"client": 1})})
        )
    with pytest.raises(RoundError, match="a number"):
        update_from_records(
            flower.RecordDict({"facts": flower.ConfigRecord({"client": "one"})})
        )


def test_clients_that_are_not_there_are_waited_for_and_then_not():
    world = World(rounds=1)
    client_app, _, _ = apps(world)
    grid = in_process_grid(client_app, 2)
    ask = FlowerAsk(grid, wait_for=3, patience=0.1)
    updates = ask(world.server.open_round(), range(3))
    assert sorted(u.client for u in updates) == [0, 1]
