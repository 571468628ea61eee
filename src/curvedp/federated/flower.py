"""Flower carries the messages: apps of its Message API around our client and server.

Thin on purpose. What is computed, paid for and refused is in :mod:`.client` and
:mod:`.server`; here tasks and updates become records and back. A refusal travels as a
record too. Its text is one that no record changes: that of a refused round or of a
spent budget, or a constant. Whatever else goes wrong is told to the client's own log.

``flwr`` is imported where it is used: the extra ``flower``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from curvedp.errors import BudgetError, CurvedpError, RoundError, missing_extra
from curvedp.federated.client import Client
from curvedp.federated.messages import Task, Update
from curvedp.noise import restore_release

__all__ = [
    "FlowerAsk",
    "client_number",
    "flwr_part",
    "introduction",
    "make_client_app",
    "make_server_app",
    "public_reason",
    "task_from_records",
    "task_to_records",
    "update_from_records",
    "update_to_records",
]

_log = logging.getLogger(__name__)
#: What the server is told where the reason may be private.
_UNSAID = "it cannot answer; its own log says why"
_FACTS, _PARAMETERS, _WHITENED, _VALUES = "facts", "parameters", "whitened_at", "values"


# -- records ---------------------------------------------------------------------------


def task_to_records(task: Task) -> Any:
    """A task as Flower's records."""
    app = flwr_part("app")
    facts = {"run_id": task.run_id, "round": task.round, "agreement": task.agreement}
    return app.RecordDict(
        {
            _FACTS: app.ConfigRecord(facts),
            _PARAMETERS: _arrays(task.parameters),
            _WHITENED: _arrays(task.whitened_at),
        }
    )


def task_from_records(records: Any) -> Task:
    """Read back what :func:`task_to_records` wrote; anything else is refused."""
    facts = _facts(records)
    return Task(
        str(facts["run_id"]),
        int(facts["round"]),
        str(facts["agreement"]),
        _tensors(records, _PARAMETERS),
        _tensors(records, _WHITENED),
    )


def update_to_records(update: Update) -> Any:
    """An update as Flower's records."""
    app = flwr_part("app")
    facts = {
        "client": update.client,
        "run_id": update.run_id,
        "agreement": update.agreement,
        "frame": update.release.frame,
        "round": update.release.step,
        "noise_std": update.release.noise_std,
    }
    return app.RecordDict(
        {_FACTS: app.ConfigRecord(facts), _VALUES: _arrays(update.release.values)}
    )


def update_from_records(records: Any) -> Update:
    """Read back what :func:`update_to_records` wrote.

    Raises:
        RoundError: the client refused, or it is not an update.
    """
    facts = _facts(records)
    if "refused" in facts:
        raise RoundError(str(facts["refused"]))
    names = {"client": int, "round": int, "noise_std": float}
    try:
        numbers = {name: kind(facts[name]) for name, kind in names.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise RoundError("a number of the message is none") from error
    release = restore_release(
        _tensors(records, _VALUES),
        str(facts["frame"]),
        int(numbers["round"]),
        noise_std=numbers["noise_std"],
    )
    client = int(numbers["client"])
    return Update(client, str(facts["run_id"]), str(facts["agreement"]), release)


# -- apps ------------------------------------------------------------------------------


def make_client_app(make_client: Callable[[Any], Client]) -> Any:
    """A Flower ClientApp.

    Args:
        make_client: gives the client of a node from its Flower context (its node
            config says which one it is). It is closed after every message: Flower may
            run each in a process of its own, and the client's folder remembers.
    """
    app, client_app = flwr_part("app"), flwr_part("clientapp").ClientApp()

    @client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Any, context: Any) -> Any:
        try:
            client = make_client(context)
            try:
                update = client.answer(task_from_records(message.content))
            finally:
                client.close()
            records = update_to_records(update)
        except Exception as error:
            facts = {"refused": public_reason(error)}
            records = app.RecordDict({_FACTS: app.ConfigRecord(facts)})
        return app.Message(records, reply_to=message)

    client_app.query()(introduction)
    return client_app


def introduction(message: Any, context: Any) -> Any:
    """Answer the server's question which client a node is."""
    app = flwr_part("app")
    try:
        facts: dict[str, Any] = {"client": client_number(context)}
    except Exception as error:
        facts = {"refused": public_reason(error)}
    return app.Message(
        app.RecordDict({_FACTS: app.ConfigRecord(facts)}), reply_to=message
    )


def public_reason(error: Exception) -> str:
    """Why a client does not answer, as far as the server may know it.

    What a file or a record is like could stand in any other text. It goes to the
    client's own log.
    """
    if isinstance(error, RoundError | BudgetError):
        _log.warning("this client refuses: %s", error)
        return error.problem
    _log.error("this client cannot answer", exc_info=error)
    return _UNSAID


def client_number(context: Any) -> int:
    """Which client a node is, by its node config ``client`` (or ``partition-id``)."""
    config = context.node_config
    number = config.get("client", config.get("partition-id"))
    if not isinstance(number, int):
        raise RoundError(
            "the node config does not say which client this is",
            "start the SuperNode with --node-config 'client=3'",
        )
    return number


def make_server_app(main: Callable[..., None], **options: Any) -> Any:
    """A Flower ServerApp that runs ``main(ask, context)``.

    Args:
        main: makes the server and its rounds; ``ask`` carries the messages.
        **options: of :class:`FlowerAsk`.
    """
    server_app = flwr_part("serverapp").ServerApp()

    @server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def run(grid: Any, context: Any) -> None:
        main(FlowerAsk(grid, **options), context)

    return server_app


class FlowerAsk:
    """Sends a task through a Flower grid and collects the updates.

    Args:
        grid: of the ServerApp.
        timeout: seconds that a round waits for answers; whoever is later is not in it.
        wait_for: clients that must be there before the first round.
        patience: seconds to wait for them.
        on_refusal: is told of clients that refuse or fail, and why.

    Attributes:
        least: clients that must be there before every later round.
    """

    def __init__(
        self,
        grid: Any,
        *,
        timeout: float = 600.0,
        wait_for: int = 1,
        patience: float = 600.0,
        on_refusal: Callable[[int, str], None] | None = None,
    ) -> None:
        self.grid = grid
        self.timeout = timeout
        self.least = 1
        self._wait_for: int | None = wait_for
        self._patience = patience
        self.on_refusal = on_refusal or _log_refusal
        self._numbers: dict[int, int] = {}
        self._is_bound = False

    def bind(self, nodes: Mapping[int, int]) -> None:
        """Take it from whoever knows their keys which nodes are which clients.

        Nodes are not asked then: one that has a key of its own, and says that it is
        another client, is refused.
        """
        self._numbers, self._is_bound = dict(nodes), True

    def __call__(self, task: Task, asked: Sequence[int]) -> list[Update]:
        """The updates that came in time, from the clients that were asked."""
        app = flwr_part("app")
        nodes = self.nodes()
        content = task_to_records(task)
        messages = [
            app.Message(
                content,
                node,
                app.MessageType.TRAIN,
                group_id=str(task.round),
                ttl=self.timeout,
            )
            for node, number in nodes.items()
            if number in asked
        ]
        updates = []
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            node = reply.metadata.src_node_id
            number = nodes.get(node, -1)
            try:
                update = update_from_records(_content(reply))
                if update.client != number:
                    raise RoundError(f"it says that it is client {update.client}")
                updates.append(update)
            except CurvedpError as refusal:
                self.on_refusal(number, refusal.problem)
        return updates

    def nodes(self) -> dict[int, int]:
        """Connected nodes and which clients they are."""
        end = time.monotonic() + self._patience
        due = self.least if self._wait_for is None else self._wait_for
        while True:
            connected = set(self.grid.get_node_ids())
            if not self._is_bound:
                self._introduce(connected - self._numbers.keys())
            known = {n: c for n, c in self._numbers.items() if n in connected}
            if len(known) >= due or time.monotonic() > end:
                self._wait_for = None  # that was for the start
                return known
            time.sleep(0.5)

    def _introduce(self, nodes: Iterable[int]) -> None:
        app = flwr_part("app")
        messages = [
            app.Message(app.RecordDict(), node, app.MessageType.QUERY, ttl=self.timeout)
            for node in nodes
        ]
        if not messages:
            return
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            try:
                number = int(_facts(_content(reply))["client"])
                self._numbers[reply.metadata.src_node_id] = number
            except (CurvedpError, TypeError, ValueError, OverflowError) as error:
                _log.warning("a node did not say which client it is: %s", error)


# -- helpers ---------------------------------------------------------------------------


def _arrays(values: Mapping[str, Tensor]) -> Any:
    plain = {n: v.detach().cpu().contiguous() for n, v in values.items()}
    return flwr_part("app").ArrayRecord(plain)


def _tensors(records: Any, name: str) -> dict[str, Tensor]:
    record = records.array_records.get(name)
    if record is None:
        raise RoundError(f"the message has no {name!r}")
    try:
        return dict(record.to_torch_state_dict())
    except Exception as error:  # numpy's reader has many ways to fail on foreign bytes
        raise RoundError(f"the arrays of {name!r} cannot be read") from error


def _facts(records: Any) -> Mapping[str, Any]:
    found = records.config_records.get(_FACTS)
    if found is None:
        raise RoundError("the message is not one of this application")
    return _Complete(found)


class _Complete(dict[str, Any]):
    """Facts of a message; one that is missing is a refusal and no KeyError."""

    def __missing__(self, name: str) -> Any:
        raise RoundError(f"the message does not say its {name!r}")


def _content(reply: Any) -> Any:
    if reply.has_error():
        raise RoundError(f"it failed: {reply.error.reason}")
    return reply.content


def _log_refusal(client: int, why: str) -> None:
    _log.warning("client %s is not in this round: %s", client, why)


def flwr_part(part: str) -> Any:
    """A module of Flower, or the refusal that names its extra."""
    import importlib

    try:
        return importlib.import_module(f"flwr.{part}")
    except ImportError:
        raise missing_extra("flwr", "flower") from None
