"""A federation from a config: what ``curvedp federated`` is made of.

The same file is given to the server and to every client, so that all of them build the
same plan, model and whitener. What differs (which client, whose data, which folder) is
said on the command line of each.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from curvedp import data as datasets
from curvedp.barrier import Provenance, Relation
from curvedp.data import ArrayDataset, DataSource, Task
from curvedp.errors import ConfigurationError
from curvedp.experiments.building import ModelShape, build_model
from curvedp.experiments.config import RunConfig
from curvedp.experiments.public import public_probe
from curvedp.federated import (
    Client,
    FederatedPlan,
    Federation,
    Server,
    Shared,
    Unit,
    View,
)
from curvedp.federated.partition import dirichlet_partition, iid_partition
from curvedp.federated.rounds import Ask, run_rounds
from curvedp.federated.server import RoundReport
from curvedp.layers import Batch
from curvedp.recipes import Recipe, get_federated_recipe
from curvedp.train import evaluate

__all__ = ["FederationConfig", "FederationResult", "serve"]

#: Types of settings, by their annotations, and what they are called.
_KINDS: dict[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "Mapping[str, Any]": (Mapping, "a table of names and values"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "tuple[float, ...]": (tuple, "a number for every client"),
}


@dataclass(frozen=True)
class FederationConfig:
    """All settings that server and clients have in common. Public.

    Attributes:
        data: built-in name, file or folder. Of the server: where its test part is. Of a
            simulation: what is split between the clients.
        data_options: what is declared about the data.
        public_data: built-in name, file or folder that is declared public, for a recipe
            with ``probe="public"``; wherever this config is. Empty for none.
        public_data_options: what is declared about it.
        model: built-in name or ``module:factory``, which may freeze a part.
        model_options: of the model.
        loss: name of a loss.
        recipe: name of a federated recipe.
        mode: of the recipe.
        settings: what differs from the recipe's defaults.
        clients: n, where sizes are not declared.
        sizes: declared number of records of every client. Without them those of the
            split are taken, and are thereby public (relation zero-out).
        rounds: T.
        view: each-client, secure-aggregate or trusted-aggregate.
        colluding: clients that tell the observer their noise.
        dropouts: clients that a secure aggregate may miss in a round.
        unit: record or client.
        relation: add-remove, zero-out or replace-one; empty chooses.
        epsilon: target, for the view; or
        noise_multiplier: s.
        delta: of (epsilon, delta).
        client_rate: probability that a client is drawn for a round.
        record_rate: probability that a client draws a record.
        records_per_round: of a client, where the client is the unit.
        partition: "iid" or "dirichlet:ALPHA", how a simulation splits the data.
        seed: of initialisation, probes and split.
        least_clients: usable updates that a round needs.
        exact_frames: refuse whiteners that differ in the last bit.
    """

    data: str = "digits"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    public_data: str = ""
    public_data_options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "logreg"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "cross-entropy"
    recipe: str = "dp-fedgd"
    mode: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    clients: int = 10
    sizes: tuple[float, ...] = ()
    rounds: int = 20
    view: str = "each-client"
    colluding: int = 0
    dropouts: int = 0
    unit: str = "record"
    relation: str = ""
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    client_rate: float = 1.0
    record_rate: float = 1.0
    records_per_round: int | None = None
    partition: str = "iid"
    seed: int = 0
    least_clients: int = 1
    exact_frames: bool = True

    def __post_init__(self) -> None:
        for own in fields(self):
            value, kind = getattr(self, own.name), str(own.type)
            if kind.endswith("| None") and value is None:
                continue
            kinds, words = _KINDS.get(kind.removesuffix(" | None"), (object, ""))
            # to Python, True is a whole number
            odd = isinstance(value, bool) and kinds is not bool
            if odd or not isinstance(value, kinds):
                raise ConfigurationError(
                    f"{own.name} of a federation is {value!r}", f"give {words}"
                )
        if self.seed < 0:
            raise ConfigurationError(
                f"seed of a federation is {self.seed}", "give a number from 0 on"
            )

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> FederationConfig:
        """From a config file or the command line; an unknown key is refused."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ConfigurationError(
                f"unknown setting {unknown[0]!r} of a federation",
                f"the settings are: {', '.join(known)}",
            )
        values = {k: v for k, v in given.items() if v is not None}
        if "sizes" in values:
            try:
                values["sizes"] = tuple(float(n) for n in values["sizes"])
            except (TypeError, ValueError):
                raise ConfigurationError(
                    f"declared sizes are {values['sizes']!r}",
                    "sizes = [6000, 6000, ...], one for each client",
                ) from None
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path) -> FederationConfig:
        """From a TOML file."""
        try:
            content = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be read: {error.strerror}", "give a TOML file"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} is not TOML: {error}") from error
        try:
            json.dumps(content)
        except TypeError as error:
            raise ConfigurationError(
                f"{path} has a value that is no text, number, list or table: {error}",
                "write a date as text, in quotation marks",
            ) from error
        return cls.from_mapping(content)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "sizes": list(self.sizes)}

    # -- what it describes -------------------------------------------------------------

    def configured_recipe(self) -> Recipe:
        """The recipe with its settings."""
        recipe = get_federated_recipe(self.recipe)
        return recipe.configure(mode=self.mode or None, **dict(self.settings))

    def source(
        self, *, with_test: bool = True, may_be_empty: bool = False
    ) -> DataSource:
        """The data as they are named; those of a client may be none."""
        source = datasets.load(
            self.data,
            with_test=with_test,
            may_be_empty=may_be_empty,
            **dict(self.data_options),
        )
        if source.task is not Task.CLASSIFICATION and self.partition != "iid":
            raise ConfigurationError(
                "a Dirichlet split needs classes", "take the partition iid"
            )
        return source

    def parts(self, train: ArrayDataset) -> list[ArrayDataset]:
        """The split of a simulation, a dataset for every client."""
        count = len(self.sizes) or self.clients
        if self.partition == "iid":
            chosen = iid_partition(len(train), count, self.seed)
        else:
            kind, _, alpha = self.partition.partition(":")
            try:
                concentration = float(alpha)
            except ValueError:
                concentration = -1.0
            if kind != "dirichlet" or concentration <= 0:
                raise ConfigurationError(
                    f"unknown partition {self.partition!r}",
                    "write iid, or dirichlet:0.3",
                )
            labels = train.targets.numpy()
            chosen = dirichlet_partition(labels, count, concentration, self.seed)
        return [
            ArrayDataset(train.inputs[i], train.targets[i])
            for i in map(torch.from_numpy, chosen)
        ]

    def declared(self, parts: list[ArrayDataset] | None = None) -> FederationConfig:
        """The same with sizes, taken from the split where none are declared."""
        if self.sizes:
            return self
        if parts is None:
            raise ConfigurationError(
                "the sizes of the clients are not declared",
                "sizes = [6000, 6000, ...] in the config, one for each client",
            )
        if Relation.parse(self.relation or "zero-out") is Relation.ADD_REMOVE:
            raise ConfigurationError(
                "sizes that are taken from the split are public, and add-remove "
                "protects them",
                "declare sizes, or take the relation zero-out",
            )
        sizes = tuple(float(len(part)) for part in parts)
        return replace(self, sizes=sizes, relation=self.relation or "zero-out")

    def plan(self) -> FederatedPlan:
        """The plan; sizes must be declared."""
        federation = Federation(
            self.declared().sizes,
            self.rounds,
            unit=Unit.parse(self.unit),
            relation=Relation.parse(self.relation or "add-remove"),
            client_rate=self.client_rate,
            record_rate=self.record_rate,
        )
        return FederatedPlan.make(
            federation,
            View.of(self.view, colluding=self.colluding, dropouts=self.dropouts),
            bound=self.configured_recipe().clip_norm,
            delta=self.delta,
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
        )

    @property
    def is_secure(self) -> bool:
        """Whether updates travel under masks."""
        return View.of(self.view).is_secure

    def shared(self, source: DataSource) -> Shared:
        """Model, recipe, plan and whitener; the same wherever this config is."""
        run = RunConfig(
            data=self.data,
            model=self.model,
            model_options=self.model_options,
            seed=self.seed,
        )
        model = build_model(run, ModelShape.of(source))
        template = Batch(*(x.new_zeros((1, *x.shape[1:])) for x in source.train[:1]))
        return Shared(
            model,
            self.loss,
            self.configured_recipe(),
            self.plan(),
            template,
            probe_seed=self.seed,
            probes=public_probe(self, source),
        )

    def server(
        self, shared: Shared, run_dir: Path | None = None, **more: Any
    ) -> Server:
        """The server."""
        return Server(
            shared,
            run_dir=run_dir,
            least_clients=self.least_clients,
            exact_frames=self.exact_frames,
            sums_only=self.is_secure,  # the apps then carry sums
            **more,
        )

    def client(
        self,
        number: int,
        shared: Shared,
        records: Any,
        run_dir: Path | None = None,
        **more: Any,
    ) -> Client:
        """A client."""
        return Client(
            number,
            shared,
            records,
            run_dir=run_dir,
            records_per_round=self.records_per_round,
            **more,
        )


@dataclass(frozen=True)
class FederationResult:
    """What came of a run.

    Attributes:
        rows: for every round its number (from 1), the number of clients in it (unless
            who was drawn is a secret that the guarantee rests on), and the
            metrics on held-out records.
        statement: epsilon with all that it means.
        epsilon: of the rounds that were made.
    """

    rows: list[dict[str, float]]
    statement: list[tuple[str, str]]
    epsilon: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "rounds": self.rows,
            "epsilon": self.epsilon,
            "statement": dict(self.statement),
        }


def serve(
    server: Server,
    ask: Ask,
    held_out: ArrayDataset | None,
    *,
    rounds: int | None = None,
    tries: int = 3,
    on_round: Callable[[dict[str, float]], None] | None = None,
) -> FederationResult:
    """Make the rounds, and evaluate each on records that are public or held out.

    Args:
        server: made or resumed.
        ask: carries the messages.
        held_out: records that nobody needs to be protected from; None for no metrics.
        rounds: how many at most.
        tries: of a round that has too few clients.
        on_round: is told of every round.
    """
    shared, rows = server.shared, []

    def report(made: RoundReport) -> None:
        row = {"round": made.round + 1.0}
        if not server.hides_participants:  # the number drawn tells of the draw
            row["clients"] = float(len(made.accepted))
        if held_out is not None:
            metrics = ("accuracy", "loss")
            row |= evaluate(shared.model, held_out, shared.loss, metrics)
        rows.append(row)
        if on_round is not None:
            on_round(row)

    run_rounds(server, ask, rounds=rounds, tries=tries, on_round=report)
    plan, statement = shared.plan, shared.plan.statement()
    if shared.whiteners.provenance is Provenance.PUBLIC:
        statement.append(("public data", "the map is made of it; it is not protected"))
    return FederationResult(rows, statement, plan.epsilon(server.round))
