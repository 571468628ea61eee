"""Clients that die, lie or are late; servers and clients that are killed and come back.

What must hold in all of them: a round goes on or is refused with a reason, and nobody
releases or pays twice.
"""

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from curvedp.accounting import read_ledger
from curvedp.errors import (
    BudgetError,
    CheckpointError,
    ConfigurationError,
    LedgerError,
    RoundError,
)
from curvedp.federated import Unit
from curvedp.federated.flower import FlowerAsk, update_from_records
from curvedp.federated.rounds import asking, run_rounds
from curvedp.federated.secagg import _Attempt
from curvedp.noise import restore_release

from .worlds import World

#: Never reproducible here: what is sent twice must come from where it was stored.
SAFE = {"unsafe_reproducible_noise": None}


@pytest.fixture
def world(tmp_path):
    made = World(
        (30, 50, 20), noise=4.0, rounds=4, folder=tmp_path, client=SAFE, server=SAFE
    )
    yield made
    made.server.close()
    for client in made.clients.values():
        client.close()


def altered(update, **changes):
    old = update.release
    values = changes.get("values", old.values)
    release = restore_release(
        values,
        changes.get("frame", old.frame),
        changes.get("step", old.step),
        noise_std=changes.get("noise_std", old.noise_std),
    )
    return replace(
        update,
        release=release,
        client=changes.get("client", update.client),
        run_id=changes.get("run_id", update.run_id),
        agreement=changes.get("agreement", update.agreement),
    )


def with_value(update, name, value):
    return altered(update, values={**update.release.values, name: value})


FAULTS = {
    "nan": (
        lambda u: with_value(u, "0.bias", u.release.values["0.bias"] * float("nan")),
        "no numbers",
    ),
    "infinity": (
        lambda u: with_value(u, "0.bias", u.release.values["0.bias"] / 0.0),
        "no numbers",
    ),
    "beyond float32": (
        lambda u: with_value(u, "0.bias", torch.full((3,), 1e300, dtype=torch.float64)),
        "no numbers",
    ),
    "wrong shape": (lambda u: with_value(u, "0.bias", torch.zeros(4)), "shape"),
    "broadcasts": (lambda u: with_value(u, "0.bias", torch.zeros(1)), "shape"),
    "missing": (
        lambda u: altered(u, values={"0.bias": u.release.values["0.bias"]}),
        "missing or unknown",
    ),
    "whole numbers": (
        lambda u: with_value(u, "0.bias", torch.zeros(3, dtype=torch.long)),
        "no numbers",
    ),
    "old round": (lambda u: altered(u, step=u.release.step - 1), "of round -1"),
    "later round": (lambda u: altered(u, step=u.release.step + 1), "of round 1"),
    "other run": (lambda u: altered(u, run_id="another"), "another run"),
    "other plan": (lambda u: altered(u, agreement="x"), "another plan"),
    "no client": (lambda u: altered(u, client=3), "no client 3"),
    "less noise": (lambda u: altered(u, noise_std=0.1), "is due"),
    "other map": (lambda u: altered(u, frame="f" * 32), "another map"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_update_is_left_out_with_a_reason(world, name):
    spoil, words = FAULTS[name]
    first, second, third = asking(world.clients)(world.server.open_round(), range(3))
    report = world.server.close_round([first, spoil(second), third])
    assert report.accepted == (0, 2)
    (reason,) = report.refused.values()
    assert words in reason
    # and the round is that of the others
    mean = sum(u.release.values["0.bias"] for u in (first, third)) / 2
    start = world.clients[0].shared.copies()["0.bias"]
    rate = world.recipe.learning_rate
    torch.testing.assert_close(world.parameters()["0.bias"], start - rate * mean)


# -- messages that cannot be read: a refusal, which leaves the others in their round ---

FACTS = {
    "client": 1, "run_id": "r", "agreement": "a", "frame": "identity", "round": 0,
    "noise_std": 1.0,
}  # fmt: skip


class Broken:
    """Arrays that fail as numpy's reader does on bytes that are none of its own."""

    def __init__(self, error):
        self.error = error

    def to_torch_state_dict(self):
        raise self.error


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ({"client": math.inf}, None, "a number of the message is none"),
        ({"round": math.inf}, None, "a number of the message is none"),
        ({"round": math.nan}, None, "a number of the message is none"),
        ({"noise_std": [1.0]}, None, "a number of the message is none"),
        ({}, EOFError("No data left in file"), "cannot be read"),
        ({}, SyntaxError("a header that is no literal"), "cannot be read"),
    ],
)
def test_a_broken_message_is_a_refusal(facts, error, words):
    records = SimpleNamespace(
        config_records={"facts": {**FACTS, **facts}},
        array_records={"values": Broken(error)},
    )
    with pytest.raises(RoundError, match=words):
        update_from_records(records)


@pytest.mark.parametrize("number", [math.inf, math.nan, "one", [1]])
def test_a_node_without_a_number_does_not_stop_the_others(number, monkeypatch):
    def reply(node, facts):
        content = SimpleNamespace(config_records={"facts": facts})
        metadata = SimpleNamespace(src_node_id=node)
        return SimpleNamespace(
            metadata=metadata, content=content, has_error=lambda: False
        )

    replies = [reply(7, {"client": number}), reply(8, {}), reply(9, {"client": 2})]
    grid = SimpleNamespace(
        get_node_ids=lambda: [7, 8, 9], send_and_receive=lambda *_, **__: replies
    )
    monkeypatch.setattr("curvedp.federated.flower.flwr_part", lambda _: MagicMock())
    assert FlowerAsk(grid, wait_for=1, patience=0).nodes() == {9: 2}


@pytest.mark.parametrize(
    "facts",
    [{"round": math.inf}, {"round": None}, {"noise_std": "much"}, {"noise_std": None}],
)
def test_unreadable_facts_lose_a_sum_and_not_the_server(facts, monkeypatch):
    monkeypatch.setattr("curvedp.federated.secagg.flwr_part", lambda _: MagicMock())
    attempt = _Attempt(SimpleNamespace(parameters={}), {7: 1})
    sent = SimpleNamespace(metrics={**FACTS, **facts}, parameters=None)
    missing = SimpleNamespace(metrics={"client": 1}, parameters=None)
    for result in (sent, missing):
        attempt.total = None
        attempt.aggregate_fit(1, [(SimpleNamespace(node_id=7), result)], [])
        assert attempt.total.reason == "a client's facts cannot be read"


def test_a_client_that_sends_twice_counts_once(world):
    updates = asking(world.clients)(world.server.open_round(), range(3))
    report = world.server.close_round([*updates, updates[0]])
    assert report.accepted == (0, 1, 2)
    assert "already" in report.refused[0]


def test_too_few_clients_leave_the_round_open(tmp_path):
    world = World((30, 50, 20), folder=tmp_path, server={"least_clients": 2, **SAFE},
                  client=SAFE, rounds=2)  # fmt: skip
    task = world.server.open_round()
    alone = asking(world.clients)(task, [0])
    with pytest.raises(RoundError, match="1 usable updates, and 2 are needed"):
        world.server.close_round(alone)
    assert world.server.round == 0
    again = world.server.open_round()
    assert again.digest() == task.digest()
    # the first client sends the same release: no second draw, no second payment
    both = asking(world.clients)(again, [0, 1])
    assert torch.equal(
        both[0].release.values["0.bias"], alone[0].release.values["0.bias"]
    )
    world.server.close_round(both)
    assert world.server.ledger.count() == 1
    assert world.clients[0].ledger.count() == 1


def test_a_round_is_tried_again_until_enough_have_answered():
    world = World((30, 50, 20), server={"least_clients": 3}, rounds=1)
    slow = {"calls": 0}

    def ask(task, asked):
        slow["calls"] += 1
        late = range(3) if slow["calls"] > 1 else range(2)
        return asking(world.clients)(task, list(late))

    run_rounds(world.server, ask)
    assert slow["calls"] == 2
    assert world.server.ledger.count() == 1
    other = World((30, 50, 20), server={"least_clients": 3}, rounds=1)
    with pytest.raises(RoundError, match="3 are needed"):
        run_rounds(other.server, lambda task, asked: [], tries=2)


# -- the server is killed -------------------------------------------------------------


def run_on(world, rounds):
    run_rounds(world.server, asking(world.clients), rounds=rounds)


def test_a_killed_server_goes_on_in_its_round(world):
    run_on(world, 2)
    task = world.server.open_round()
    sent = asking(world.clients)(task, range(3))
    world.server.close()  # killed before it used what came
    world.server = world.make_server()
    assert world.server.round == 2
    again = world.server.open_round()
    assert again.digest() == task.digest()
    resent = asking(world.clients)(again, range(3))
    for old, new in zip(sent, resent, strict=True):
        for name, value in old.release.values.items():
            assert torch.equal(value, new.release.values[name])
    world.server.close_round(resent)
    run_on(world, None)
    assert world.server.rounds_left == 0
    assert world.server.ledger.count() == 4
    assert world.server.ledger.epsilon() == pytest.approx(world.plan.epsilon())
    for client in world.clients.values():
        assert client.ledger.count() == 4
    with pytest.raises(BudgetError, match="all 4 planned rounds"):
        world.server.open_round()


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path):
    def make(folder):
        return World(
            (30, 50, 20), noise=4.0, rounds=4, folder=folder, recipe="dp-fedkfc",
            hidden=4, refresh=2, probe_size=32,
        )  # fmt: skip

    whole, broken = make(tmp_path / "a"), make(tmp_path / "b")
    run_on(whole, None)
    for _ in range(4):
        run_on(broken, 1)
        broken.server.close()
        broken.server = broken.make_server()
    assert broken.server.rounds_left == 0
    for name, value in whole.parameters().items():
        assert torch.equal(value, broken.parameters()[name])


def test_a_folder_of_other_settings_is_refused(world, tmp_path):
    run_on(world, 1)
    world.server.close()
    for client in world.clients.values():
        client.close()
    with pytest.raises(ConfigurationError, match="belongs to a run with"):
        World((30, 50, 20), noise=5.0, rounds=4, folder=tmp_path)


def test_a_server_whose_ledger_was_cut_is_refused(world, tmp_path):
    run_on(world, 2)
    world.server.close()
    path = tmp_path / "server" / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(LedgerError):
        world.make_server()


TRUSTED = {"noise": 4.0, "rounds": 3, "view": "trusted-aggregate", "hidden": 4}


def lose_newest(folder):
    shutil.rmtree(max((folder / "checkpoints").glob("step-*")))


@pytest.mark.parametrize("view", ["each-client", "trusted-aggregate"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_mean_is_made_once_whatever_becomes_of_the_checkpoint(tmp_path, view, begun):
    """Two means of one round, with other noise or of other clients, tell too much."""
    world = World((30, 50, 20), folder=tmp_path, client=SAFE, server=SAFE,
                  **{**TRUSTED, "view": view})  # fmt: skip
    run_rounds(world.server, asking({0: world.clients[0], 1: world.clients[1]}),
               rounds=2)  # fmt: skip
    if begun:
        world.server.open_round()
    made, spent = world.parameters(), world.server.ledger.count()
    world.server.close()
    lose_newest(tmp_path / "server")
    world.server = world.make_server()
    assert world.server.round == 2
    for name, value in world.parameters().items():
        assert torch.equal(value, made[name])
    assert world.server.ledger.count() == spent
    run_on(world, None)
    assert world.server.ledger.count() == 3


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_round_whose_mean_is_lost_moves_nothing(tmp_path, rounds):
    world = World((30, 50, 20), folder=tmp_path, client=SAFE, server=SAFE, **TRUSTED)
    run_on(world, rounds - 1)
    before = world.parameters()
    run_on(world, 1)
    world.server.close()
    lose_newest(tmp_path / "server")
    shutil.rmtree(tmp_path / "server" / "journal")
    world.server = world.make_server()
    assert world.server.round == rounds  # and never again
    for name, value in world.parameters().items():
        assert torch.equal(value, before[name])
    assert "not made again" in world.server.ledger.notes()[-1]
    run_on(world, None)
    assert world.server.ledger.count() == 3


def test_a_server_that_was_killed_before_it_moved_moves_by_the_stored_mean(
    tmp_path, monkeypatch
):
    world = World((30, 50, 20), folder=tmp_path, client=SAFE, server=SAFE, **TRUSTED)
    kept = []
    monkeypatch.setattr(world.server, "_move", lambda mean: kept.append(mean) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_on(world, 1)
    world.server.close()
    world.server = world.make_server()
    assert world.server.round == 1
    rate, start = world.recipe.learning_rate, world.shared().copies()["0.bias"]
    moved = start - rate * kept[0].values["0.bias"]
    torch.testing.assert_close(world.parameters()["0.bias"], moved)


def test_a_server_without_checkpoints_is_refused(world, tmp_path):
    run_on(world, 2)
    world.server.close()
    shutil.rmtree(tmp_path / "server" / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        world.make_server()


# -- a client is killed ---------------------------------------------------------------


def test_a_restarted_client_sends_what_it_sent(world):
    task = world.server.open_round()
    sent = world.clients[1].answer(task)
    world.clients[1].close()
    world.clients[1] = world.client(1)
    again = world.clients[1].answer(task)
    for name, value in sent.release.values.items():
        assert torch.equal(value, again.release.values[name])
    assert world.clients[1].ledger.count() == 1


def test_a_client_that_lost_its_release_sits_the_round_out(world, tmp_path):
    task = world.server.open_round()
    world.clients[1].answer(task)
    world.clients[1].close()
    shutil.rmtree(tmp_path / "client-1" / "journal")
    world.clients[1] = world.client(1)
    with pytest.raises(RoundError, match="release is gone"):
        world.clients[1].answer(task)
    report = world.server.close_round(asking(world.clients)(task, range(3)))
    assert report.accepted == (0, 2)
    run_on(world, 1)  # and is back in the next one
    assert world.clients[1].ledger.count() == 2


def test_a_client_that_dies_and_comes_back_pays_for_its_rounds_alone(world):
    run_on(world, 1)
    missing = world.clients.pop(1)
    run_on(world, 2)
    world.clients[1] = missing
    run_on(world, None)
    assert world.clients[1].ledger.paid_steps() == (0, 3)
    assert world.server.ledger.count() == 4
    assert world.server.ledger.epsilon() <= world.plan.epsilon() * (1 + 1e-12)


@pytest.mark.parametrize("unit", list(Unit))
def test_where_a_draw_is_in_the_price_the_first_answer_pays_for_the_run(tmp_path, unit):
    """Not drawn is a part of the event: rounds that it was in are not all it costs."""
    whole = unit is Unit.CLIENT
    world = World((30, 50, 20), noise=4.0, rounds=6, client_rate=0.5, unit=unit,
                  view="trusted-aggregate", folder=tmp_path,
                  client={"records_per_round": 64} if whole else {})  # fmt: skip
    task = world.server.open_round()
    planned = pytest.approx(world.plan.epsilon())
    world.clients[0].answer(replace(task, round=1))
    assert world.clients[0].ledger.epsilon() == planned
    world.clients[0].close()
    world.clients[0] = world.client(0)
    world.clients[0].answer(replace(task, round=4))
    assert world.clients[0].ledger.paid_steps() == (1, 4)
    assert read_ledger(tmp_path / "client-0/ledger.jsonl").epsilon() == planned
    with pytest.raises(RoundError):  # it was not asked for round 2 then
        world.clients[0].answer(replace(task, round=2))


def test_where_the_server_is_the_adversary_rounds_without_a_client_cost_it_nothing():
    world = World((30, 50, 20), noise=4.0, rounds=6, client_rate=0.5)
    task = world.server.open_round()
    for number in (1, 4):
        world.clients[0].answer(replace(task, round=number))
    always = World((30, 50, 20), noise=4.0, rounds=2)
    spent = world.clients[0].ledger.epsilon()
    assert spent == pytest.approx(always.plan.epsilon())


def test_the_command_line_says_who_the_epsilon_is_against(world, tmp_path):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from curvedp.cli.app import app

    run_on(world, 2)
    done = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "server")])
    assert done.exit_code == 0, done.output
    assert "every client's update" in " ".join(done.stdout.split())


def test_a_server_that_asks_twice_with_other_parameters_is_refused(world):
    task = world.server.open_round()
    world.clients[0].answer(task)
    moved = {n: v + 1e-3 for n, v in task.parameters.items()}
    with pytest.raises(RoundError, match="at other parameters"):
        world.clients[0].answer(replace(task, parameters=moved))
    with pytest.raises(RoundError, match="at other parameters"):
        world.clients[0].answer(replace(task, run_id="another"))
    assert world.clients[0].ledger.count() == 1


def test_a_server_that_goes_back_is_refused(world):
    task = world.server.open_round()
    world.clients[0].answer(replace(task, round=2))
    with pytest.raises(RoundError, match="after round 2"):
        world.clients[0].answer(task)
    with pytest.raises(RoundError, match="not in the plan"):
        world.clients[0].answer(replace(task, round=4))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: {**p, "0.bias": p["0.bias"] * float("nan")}, "no numbers"),
        (lambda p: {**p, "0.bias": torch.zeros(5)}, "shape"),
        (lambda p: {"0.bias": p["0.bias"]}, "missing or unknown"),
    ],
)
def test_a_wrong_task_is_refused_before_data_is_touched(world, spoil, words):
    task = world.server.open_round()
    with pytest.raises(RoundError, match=words):
        world.clients[0].answer(replace(task, parameters=spoil(task.parameters)))
    assert world.clients[0].ledger.count() == 0


def test_a_client_with_other_settings_refuses(world):
    task = world.server.open_round()
    other = World((30, 50, 20), noise=5.0, rounds=4)
    with pytest.raises(RoundError, match="another plan"):
        other.clients[0].answer(task)


def test_ledgers_say_who_the_epsilon_is_against(world, tmp_path):
    run_on(world, None)
    for name in ("server", "client-0"):
        record = read_ledger(tmp_path / name / "ledger.jsonl")
        assert record.header.facts["view"] == "each-client"
        assert record.header.unit == "record"
        assert record.epsilon() == pytest.approx(world.plan.epsilon())
