"""A Flower grid without a network: for simulations, and for tests of the apps."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterable
from typing import Any

from curvedp.errors import CurvedpError
from curvedp.federated.flower import flwr_part

__all__ = ["in_process_grid"]


def in_process_grid(client_app: Any, clients: int) -> Any:
    """A Flower grid whose nodes live in this process, one after the other.

    The same apps as in a deployment, without ports, processes or Ray.
    """
    app, serverapp = flwr_part("app"), flwr_part("serverapp")
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    contexts = {
        number + 1: app.Context(
            run_id=1,
            node_id=number + 1,
            node_config={"client": number},
            state=app.RecordDict(),
            run_config={},
        )
        for number in range(clients)
    }

    replies: dict[str, Any] = {}

    class InProcessGrid(serverapp.Grid):  # type: ignore[name-defined, misc]
        """Calls the client app where a network would carry the message."""

        def set_run(self, run: Any) -> None:
            self._run = run

        @property
        def run(self) -> Any:
            return self._run

        def create_message(self, *args: Any, **kwargs: Any) -> Any:
            return app.Message(*args, **kwargs)

        def get_node_ids(self) -> list[int]:
            return list(contexts)

        def push_messages(self, messages: Iterable[Any]) -> list[str]:
            found = []
            for message in messages:  # answered at once, and fetched later
                name = uuid.uuid4().hex
                message.metadata.__dict__["_message_id"] = name  # as Flower does it
                replies[name] = self._answer(message)
                found.append(name)
            return found

        def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
            return [replies.pop(name) for name in message_ids if name in replies]

        def send_and_receive(
            self, messages: Iterable[Any], *, timeout: float | None = None
        ) -> list[Any]:
            return [self._answer(message) for message in messages]

        def _answer(self, message: Any) -> Any:
            context = contexts[message.metadata.dst_node_id]
            try:  # with a copy, as a network would: apps may take messages to pieces
                return client_app(copy.deepcopy(message), context)
            except CurvedpError as refusal:  # as from a node whose app has failed
                return app.Message(app.Error(0, refusal.problem), reply_to=message)

    return InProcessGrid()
