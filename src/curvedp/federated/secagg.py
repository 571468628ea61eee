"""Secure aggregation by Flower's SecAgg+: the server sees sums alone.

Flower has the protocol as a workflow of the server and a mod of the clients. Four
messages go to every client in a round: it makes keys; it shares its secrets with the
others; it sends its masked share; it helps to unmask the sum of those that came.

Four things are added to what Flower does:

- **Masks of full strength.** Flower folds the 256 bits of a mask's seed into 32 and
  draws with a Mersenne twister, which a server can search through. Here masks are the
  keystream of ChaCha20 with all bits (:mod:`.masking`), on both sides.
- **A client checks what it is asked** (:mod:`.masking`): the grid, the number of shares
  and the threshold are the plan's; nobody is named twice; no client is both in the sum
  and dropped, which would give away both of its secrets.
- **The server checks what it gets** (:mod:`.screening`): a reply that is not whole
  counts as a drop-out, and no reply stops the server.
- **Every share leaves once.** A round that breaks before shares left is tried again;
  one that breaks after is lost.

It holds against a server that follows the protocol and is curious, with fewer than the
declared number of clients. Flower does not sign the clients' keys, so a server that
forges them could read single shares; the view each-client holds against that one too.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvedp.errors import RoundError
from curvedp.federated.client import Client
from curvedp.federated.flower import (
    FlowerAsk,
    flwr_part,
    introduction,
    public_reason,
)
from curvedp.federated.masking import (
    CLIENT_PART,
    SERVER_PART,
    guard,
    with_strong_masks,
)
from curvedp.federated.messages import Task
from curvedp.federated.rounds import Ask
from curvedp.federated.screening import ScreenedGrid, sender
from curvedp.federated.secure import MODULUS, SumGrid, Total
from curvedp.federated.server import Server

__all__ = ["SecureAsk", "carried", "make_secure_client_app"]

_log = logging.getLogger(__name__)
_COMPAT = "compat.common.recorddict_compat"
#: Tries of a round that a client may break before it is left out of that round.
_FAULTS = 2
#: Flower's code of an app that has failed.
_FAILED = 2


# -- a client --------------------------------------------------------------------------


def make_secure_client_app(make_client: Callable[[Any], Client]) -> Any:
    """A Flower ClientApp whose updates leave under masks alone.

    Args:
        make_client: as of :func:`curvedp.federated.flower.make_client_app`.
    """
    app, compat = flwr_part("app"), flwr_part(_COMPAT)
    typing = flwr_part("common")

    def checked(message: Any, context: Any, go_on: Callable[..., Any]) -> Any:
        try:
            with _open(make_client, context) as client:
                guard(message, client.grid)
            return go_on(message, context)
        except Exception as error:  # Flower would send its text
            reason = app.Error(_FAILED, public_reason(error))
            return app.Message(reason, reply_to=message)

    def masked(message: Any, context: Any, go_on: Callable[..., Any]) -> Any:
        # asked for with every message: the app may have been sent to another process
        return with_strong_masks(CLIENT_PART).secaggplus_mod(message, context, go_on)

    client_app = flwr_part("clientapp").ClientApp()
    with_strong_masks(CLIENT_PART)  # refuse a Flower without them here and now

    @client_app.train(mods=[checked, masked])  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Any, context: Any) -> Any:
        task = _task(compat.recorddict_to_fitins(message.content, keep_input=True))
        with _open(make_client, context) as client:
            update = client.masked_answer(task)
        release = update.release
        facts = {
            "client": update.client,
            "run_id": update.run_id,
            "agreement": update.agreement,
            "frame": release.frame,
            "round": release.step,
            "noise_std": release.noise_std,
        }
        arrays = [release.values[name].numpy() for name in sorted(release.values)]
        fit = typing.FitRes(
            status=typing.Status(typing.Code.OK, ""),
            parameters=typing.ndarrays_to_parameters(arrays),
            num_examples=1,  # a weight; the true number would leave unmasked
            metrics=facts,
        )
        return app.Message(compat.fitres_to_recorddict(fit, False), reply_to=message)

    client_app.query()(introduction)
    return client_app


class _open:
    """A client for the length of a block."""

    def __init__(self, make_client: Callable[[Any], Client], context: Any) -> None:
        self._client = make_client(context)

    def __enter__(self) -> Client:
        return self._client

    def __exit__(self, *error: object) -> None:
        self._client.close()


# -- the server ------------------------------------------------------------------------


def carried(ask: FlowerAsk, server: Server) -> Ask:
    """What carries a server's messages: singly, or under masks if its plan says so."""
    return ask if server.grid is None else SecureAsk(ask, server.grid)


class SecureAsk:
    """Asks for a round's sum through a Flower grid.

    Args:
        ask: knows the nodes and how long to wait for them.
        sums: the plan's grid.
        tries: of a round that breaks before any share has left.
    """

    def __init__(self, ask: FlowerAsk, sums: SumGrid, *, tries: int = 5) -> None:
        self._ask = ask
        self._sums = sums
        self._tries = tries
        self._workflow = _workflow()

    def __call__(self, task: Task, asked: Sequence[int]) -> Total:
        """The sum of the shares of the clients that stayed; or why it is lost.

        Raises:
            RoundError: it broke before any share had left. Ask again later.
        """
        faults: Counter[int] = Counter()
        for _ in range(self._tries):
            nodes = {node: c for node, c in self._ask.nodes().items() if c in asked}
            steady = {n: c for n, c in nodes.items() if faults[n] < _FAULTS}
            if len(steady) >= self._sums.threshold:
                nodes = steady
            if len(nodes) < self._sums.threshold:
                break
            attempt = _Attempt(task, nodes)
            grid = ScreenedGrid(self._ask.grid, task, nodes, self._ask.on_refusal)
            flow = self._workflow(
                1.0,  # shares of a secret for everybody: Flower takes no 2 as a number
                # Flower takes all of them as a share of 1
                1.0 if self._sums.threshold == len(nodes) else self._sums.threshold,
                max_weight=1.0,
                clipping_range=self._sums.half_range,
                quantization_range=self._sums.levels,
                modulus_range=MODULUS,
                timeout=self._ask.timeout,
            )
            try:
                flow(grid, attempt.context())
            except Exception as error:  # of Flower's, on bytes that clients have sent
                _log.error("secure aggregation has failed", exc_info=error)
            if attempt.total is not None:
                return attempt.total
            if flow.shares_left:
                return Total(reason="the sum of the shares could not be unmasked")
            faults.update(grid.missing)
        raise RoundError(
            f"round {task.round} has too few clients for secure aggregation: "
            f"{self._sums.threshold} must stay to its end",
            "wait for more clients and ask again; nothing was spent",
        )


def _workflow() -> Any:
    """Flower's workflow, which stops early while nothing has left."""
    base = with_strong_masks(SERVER_PART).SecAggPlusWorkflow

    class Workflow(base):  # type: ignore[misc, valid-type]
        shares_left = False

        # who has not shared its secrets could not be taken out of the sum again

        def setup_stage(self, grid: Any, context: Any, state: Any) -> bool:
            fine = super().setup_stage(grid, context, state)
            return bool(fine) and state.active_node_ids == state.sampled_node_ids

        def share_keys_stage(self, grid: Any, context: Any, state: Any) -> bool:
            fine = super().share_keys_stage(grid, context, state)
            return bool(fine) and state.active_node_ids == state.sampled_node_ids

        def collect_masked_vectors_stage(
            self, grid: Any, context: Any, state: Any
        ) -> bool:
            self.shares_left = True
            return bool(super().collect_masked_vectors_stage(grid, context, state))

    return Workflow


class _Attempt:
    """Flower's strategy of one round: says what is asked, and keeps what comes."""

    def __init__(self, task: Task, nodes: Mapping[int, int]) -> None:
        self._task = task
        self._nodes = nodes
        self.total: Total | None = None

    def context(self) -> Any:
        app, constant = flwr_part("app"), flwr_part("server.workflow.constant")
        legacy = flwr_part("server.compat.legacy_context").LegacyContext
        own = app.Context(
            run_id=0, node_id=0, node_config={}, state=app.RecordDict(), run_config={}
        )
        context = legacy(own, strategy=self)
        round_key = constant.Key.CURRENT_ROUND
        context.state.config_records[constant.MAIN_CONFIGS_RECORD] = app.ConfigRecord(
            {round_key: self._task.round + 1}
        )
        context.state.array_records[constant.MAIN_PARAMS_RECORD] = app.ArrayRecord()
        return context

    def configure_fit(self, *_: Any) -> list[tuple[Any, Any]]:
        return [(SimpleNamespace(node_id=n), _fit(self._task)) for n in self._nodes]

    def aggregate_fit(
        self, server_round: int, results: Any, failures: Any
    ) -> tuple[None, dict[str, Any]]:
        common = flwr_part("common")
        senders = []
        for proxy, result in results:
            facts = result.metrics
            if facts.get("client") != self._nodes[proxy.node_id]:
                self.total = Total(reason="a node says that it is another client")
                return None, {}
            try:
                senders.append(sender(facts))
            except (KeyError, TypeError, ValueError, OverflowError):
                self.total = Total(reason="a client's facts cannot be read")
                return None, {}
        names = sorted(self._task.parameters)
        try:
            # all results hold the same mean of the shares
            arrays = common.parameters_to_ndarrays(results[0][1].parameters)
            values = {
                name: torch.from_numpy(np.asarray(array)) * len(results)
                for name, array in zip(names, arrays, strict=True)
            }
        except (IndexError, TypeError, ValueError):
            self.total = Total(tuple(senders), reason="the sum is not of the model")
            return None, {}
        self.total = Total(tuple(senders), values)
        return None, {}


# -- tasks as Flower's older records ---------------------------------------------------


def _fit(task: Task) -> Any:
    common = flwr_part("common")
    tensors = [task.parameters[n] for n in sorted(task.parameters)]
    tensors += [task.whitened_at[n] for n in sorted(task.whitened_at)]
    config = {
        "run_id": task.run_id,
        "round": task.round,
        "agreement": task.agreement,
        "parameters": json.dumps(sorted(task.parameters)),
        "whitened_at": json.dumps(sorted(task.whitened_at)),
    }
    arrays = [tensor.detach().cpu().numpy() for tensor in tensors]
    return common.FitIns(common.ndarrays_to_parameters(arrays), config)


def _task(fit: Any) -> Task:
    common, config = flwr_part("common"), fit.config
    try:
        arrays = common.parameters_to_ndarrays(fit.parameters)
        tensors = [torch.from_numpy(np.array(array)) for array in arrays]
        names = [json.loads(config[part]) for part in ("parameters", "whitened_at")]
        if len(tensors) != len(names[0]) + len(names[1]):
            raise ValueError
        parameters: dict[str, Tensor] = dict(zip(names[0], tensors, strict=False))
        made_of = dict(zip(names[1], tensors[len(names[0]) :], strict=True))
        return Task(
            str(config["run_id"]),
            int(config["round"]),
            str(config["agreement"]),
            parameters,
            made_of,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RoundError("the message is not one of this application") from error
