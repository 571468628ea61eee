"""What comes back in secure aggregation is looked at before Flower's protocol sees it.

Flower takes replies to pieces as if all of them were whole. Here a reply that misses a
record, or whose lists do not fit each other, is left out with a reason, as that of a
client that has dropped out. What it left in the sum is taken out as a drop-out's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from curvedp.errors import RoundError
from curvedp.federated.flower import flwr_part
from curvedp.federated.messages import Task, Update
from curvedp.noise import restore_release

__all__ = ["ScreenedGrid", "sender"]

_CONSTANTS = "common.secure_aggregation.secaggplus_constants"
_COMPAT = "compat.common.recorddict_compat"


class ScreenedGrid:
    """A Flower grid that gives sound replies alone; for one try of a round.

    Args:
        grid: carries the messages.
        task: what is asked.
        nodes: which client a node is, for those that are asked.
        on_refusal: is told of every client that is left out, and why.

    Attributes:
        missing: nodes whose replies did not come or were left out.
    """

    def __init__(
        self,
        grid: Any,
        task: Task,
        nodes: Mapping[int, int],
        on_refusal: Callable[[int, str], None],
    ) -> None:
        self._grid = grid
        values = [task.parameters[name] for name in sorted(task.parameters)]
        # the weight goes before the values
        self._shapes = [(1,), *(tuple(value.shape) for value in values)]
        self._nodes = nodes
        self._on_refusal = on_refusal
        self.missing: set[int] = set()

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None = None
    ) -> list[Any]:
        """Replies that can be used, one for each node at most."""
        sent = list(messages)
        constants = flwr_part(_CONSTANTS)
        configs = constants.RECORD_KEY_CONFIGS
        stages = {
            m.metadata.dst_node_id: m.content.config_records[configs][
                constants.Key.STAGE
            ]
            for m in sent
        }
        sound: dict[int, Any] = {}
        for reply in self._grid.send_and_receive(sent, timeout=timeout):
            node = reply.metadata.src_node_id
            try:
                if node not in stages or node in sound:
                    raise RoundError("it was not asked, or has answered already")
                self._check(reply, stages[node], self._nodes[node])
                sound[node] = reply
            except RoundError as refusal:
                self._on_refusal(self._nodes.get(node, -1), refusal.problem)
            except Exception:  # foreign bytes have many ways to fail
                self._on_refusal(self._nodes[node], "its reply cannot be read")
        self.missing |= stages.keys() - sound.keys()
        return list(sound.values())

    def _check(self, reply: Any, stage: str, client: int) -> None:
        """Refuse a reply that is not what a stage of the protocol needs."""
        if reply.has_error():
            raise RoundError(f"it failed: {reply.error.reason}")
        constants = flwr_part(_CONSTANTS)
        key, stages = constants.Key, constants.Stage
        found = reply.content.config_records.get(constants.RECORD_KEY_CONFIGS)
        if found is None:
            raise RoundError("its reply has no records of secure aggregation")
        if stage == stages.SETUP:
            _all_of(bytes, [found.get(key.PUBLIC_KEY_1), found.get(key.PUBLIC_KEY_2)])
        elif stage == stages.SHARE_KEYS:
            _pairs(found.get(key.DESTINATION_LIST), found.get(key.CIPHERTEXT_LIST))
        elif stage == stages.UNMASK:
            _pairs(found.get(key.NODE_ID_LIST), found.get(key.SHARE_LIST))
            if not set(found[key.NODE_ID_LIST]) <= self._nodes.keys():
                raise RoundError("it has shares of a node that was not asked")
        else:
            self._check_share(reply, found.get(key.MASKED_PARAMETERS), client)

    def _check_share(self, reply: Any, masked: Any, client: int) -> None:
        common = flwr_part("common")
        _all_of(bytes, masked)
        arrays = [common.bytes_to_ndarray(b) for b in masked]
        if [a.shape for a in arrays] != self._shapes or not all(
            np.issubdtype(a.dtype, np.integer) for a in arrays
        ):
            raise RoundError("its masked values are not of the model's shape")
        result = flwr_part(_COMPAT).recorddict_to_fitres(reply.content, True)
        if sender(result.metrics).client != client:
            raise RoundError("it says that it is another client")


def sender(facts: Mapping[str, Any]) -> Update:
    """What a client says beside its share, without values.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: it cannot be read.
    """
    release = restore_release(
        {},
        str(facts["frame"]),
        int(facts["round"]),
        noise_std=float(facts["noise_std"]),
    )
    client, run, agreed = facts["client"], facts["run_id"], facts["agreement"]
    return Update(int(client), str(run), str(agreed), release)


def _pairs(numbers: Any, values: Any) -> None:
    _all_of(int, numbers)
    _all_of(bytes, values)
    if len(numbers) != len(values):
        raise RoundError("two lists of its reply do not fit each other")


def _all_of(kind: type, values: Any) -> None:
    if not isinstance(values, Sequence) or not all(type(v) is kind for v in values):
        raise RoundError("a list of its reply is missing or has other values")
