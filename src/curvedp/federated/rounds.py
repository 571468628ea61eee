"""The loop over rounds, whatever carries the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from curvedp.errors import CurvedpError, RoundError
from curvedp.federated.client import Client
from curvedp.federated.messages import Task, Update
from curvedp.federated.secure import Total
from curvedp.federated.server import RoundReport, Server

__all__ = ["Ask", "asking", "run_rounds"]

#: Sends a task to some clients; gives the updates that came back in time, or their sum.
Ask = Callable[[Task, Sequence[int]], Sequence[Update] | Total]


def run_rounds(
    server: Server,
    ask: Ask,
    *,
    rounds: int | None = None,
    tries: int = 3,
    on_round: Callable[[RoundReport], None] | None = None,
) -> None:
    """Make the rounds that are left, or some of them.

    Args:
        server: opens and closes rounds.
        ask: carries messages.
        rounds: how many at most.
        tries: how often a round that has too few usable updates is asked for. It costs
            nothing: whoever has answered sends the same again.
        on_round: is told of every round that was made.

    Raises:
        RoundError: a round found too few clients. Nothing is lost: resume later.
    """
    left = server.rounds_left if rounds is None else min(rounds, server.rounds_left)
    for _ in range(left):
        report = _one_round(server, ask, tries)
        if on_round is not None:
            on_round(report)


def _one_round(server: Server, ask: Ask, tries: int) -> RoundReport:
    task, asked = server.open_round(), server.participants()
    for remaining in reversed(range(tries)):
        try:
            answer = ask(task, asked)
            if isinstance(answer, Total):
                return server.close_sum(answer)
            return server.close_round(answer)
        except RoundError:
            if not remaining:
                raise
    raise AssertionError("a round is made or refused")


def asking(
    clients: Mapping[int, Client],
    on_refusal: Callable[[int, CurvedpError], None] | None = None,
) -> Ask:
    """Clients in this process, one after the other."""

    def ask(task: Task, asked: Sequence[int]) -> list[Update]:
        updates = []
        for number in asked:
            if number not in clients:
                continue
            try:
                updates.append(clients[number].answer(task))
            except CurvedpError as refusal:
                if on_refusal is not None:
                    on_refusal(number, refusal)
        return updates

    return ask
