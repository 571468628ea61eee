"""What a recipe is: one method on one page.

A recipe is a frozen description: which clipping, which whitening, which transforms and
which optimiser make up the method, and their defaults. It holds no data and does no
work; the engine in :mod:`curvedp.train` builds what it describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from curvedp.clipping import ClippingRule, clipping_rule
from curvedp.errors import ConfigurationError
from curvedp.plan import Correlation
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.eigenvalues import Eigenvalues
from curvedp.recipes.pretraining import Pretraining
from curvedp.recipes.search import Range, SearchSpace
from curvedp.recipes.types import check_least, check_types
from curvedp.update import Chain, Transform

__all__ = ["Recipe"]

_OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


#: What makes the method and is not a setting of it.
_FIXED = {
    "name",
    "summary",
    "private",
    "federated",
    "chain",
    "optimiser",
    "curvature",
    "correlation",
    "eigenvalues",
    "pretraining",
    "modes",
    "search",
}
#: How far a search of the learning rate goes where a recipe declares none.
_FACTOR = 10.0


@dataclass(frozen=True)
class Recipe:
    """A method and its settings.

    Attributes:
        name: as it is called on the command line.
        summary: one line for people.
        private: False for references that have no guarantee; they are labelled so
            wherever they appear.
        federated: True for methods of clients and a server
            (:mod:`curvedp.federated`); the chain is then the server's.
        optimiser: "sgd", "adam" or "adamw", used by the Trainer and the command line (a
            hand-written loop brings its own).
        learning_rate: of the optimiser.
        momentum: of sgd; beta1 of adam and adamw, mostly 0.9 there.
        weight_decay: of the optimiser.
        clipping: "flat", "normalised" or "per-layer".
        clip_norm: C.
        chain: transforms on the released gradient. Their fields are settings of the
            recipe, by the same names.
        curvature: how gradients are whitened before clipping; None leaves them alone.
        correlation: how the noise of different steps is correlated; None draws it
            independently.
        eigenvalues: how the spectrum is found that correlated noise is designed for;
            None designs it for the noise in the parameters.
        pretraining: how parameters are trained on public data before the first private
            step; None starts from those that the model has.
        modes: further sets of defaults by name, for ``configure(mode=...)``.
        search: what ``curvedp sweep`` searches of the settings, and where.
    """

    name: str
    summary: str
    private: bool = True
    federated: bool = False
    optimiser: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clipping: str = "flat"
    clip_norm: float = 1.0
    chain: Chain = field(default_factory=Chain)
    curvature: Curvature | None = None
    correlation: Correlation | None = None
    eigenvalues: Eigenvalues | None = None
    pretraining: Pretraining | None = None
    modes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    search: SearchSpace = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.setting_names()
        unknown = sorted(set(self.search) - set(names))
        if unknown:
            raise ConfigurationError(
                f"recipe {self.name!r} searches {unknown[0]!r}, which is no setting",
                f"its settings are: {', '.join(names)}",
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigurationError(
                f"recipe {self.name!r} has two settings called {', '.join(twice)}",
                "rename the field of the transform",
            )
        self._check_correlation()
        self._check_eigenvalues()

    def configure(self, mode: str | None = None, **settings: Any) -> Recipe:
        """The same method with other settings; None leaves a setting as it is."""
        if mode is not None and mode != "default":
            return self._in_mode(mode).configure(**settings)
        given = {k: v for k, v in settings.items() if v is not None}
        unknown = given.keys() - set(self.setting_names())
        if unknown:
            raise ConfigurationError(
                f"recipe {self.name!r} has no setting {', '.join(sorted(unknown))}",
                f"its settings are: {', '.join(self.setting_names())}",
            )
        own_types = {f.name: str(f.type) for f in fields(Recipe)}
        check_types(given, own_types | self.chain.setting_types())
        for name in ("learning_rate", "momentum", "weight_decay"):
            check_least(name, given.get(name, 0.0), 0.0)
        configured = self._with(given)
        configured.clipping_rule()
        return configured

    def _check_correlation(self) -> None:
        """Refuse what does not go with noise that later steps take back."""
        if self.correlation is None:
            return
        if self.chain.reads_noise and not self.chain.transforms[0].reads_noise:
            raise ConfigurationError(
                "a transform before the one that corrects for noise averages over "
                "steps, and takes their noise for independent",
                "put the one that corrects for noise first, or use a recipe with "
                "independent noise",
            )
        if self.curvature is not None and self.curvature.moves:
            raise ConfigurationError(
                "the floor of a clamp makes another whitener of every step, and a new "
                "whitener ends the block of noise",
                "set floor_base = 1 for a floor that stays, clamp = 'off', or use a "
                "recipe with independent noise",
            )
        if self.curvature is not None and self.curvature.from_releases:
            raise ConfigurationError(
                f"probe = {self.curvature.probe!r} learns curvature from releases and "
                "takes their noise out as if that of every step were its own",
                "use probe = 'synthetic' or 'public', or a recipe with independent "
                "noise",
            )

    def _check_eigenvalues(self) -> None:
        """Refuse noise for the curvature of steps that are not plain descent."""
        if self.eigenvalues is None:
            return
        if self.correlation is None or self.correlation.noise_momentum:
            raise ConfigurationError(
                "noise is designed for curvature only where it is correlated, and for "
                "plain steps",
                "leave noise_momentum at 0; without eigenvalues there is dp-bandmf",
            )
        own = self.curvature
        plain = own is None or (own.back_map, own.clip_order) == ("natural", "in")
        if own is not None and not plain:
            raise ConfigurationError(
                f"with back_map = {own.back_map!r} and clip_order = "
                f"{own.clip_order!r}, whitened steps are descent in no coordinates "
                "whose curvature the noise could be designed for",
                "set back_map = 'natural' and clip_order = 'in'",
            )

    def then(self, *transforms: Transform) -> Recipe:
        """The same method with further transforms after its own."""
        return replace(self, chain=Chain((*self.chain.transforms, *transforms)))

    def _in_mode(self, mode: str) -> Recipe:
        if mode not in self.modes:
            known = ", ".join(["default", *self.modes])
            raise ConfigurationError(
                f"recipe {self.name!r} has no mode {mode!r}", f"its modes are: {known}"
            )
        return self._with(self.modes[mode])

    def _with(self, given: Mapping[str, Any]) -> Recipe:
        """Settings of curvature and transforms go there, the others are its own."""
        names = [] if self.curvature is None else self.curvature.setting_names()
        inner = {k: v for k, v in given.items() if k in names}
        after = {k: v for k, v in given.items() if k in self.chain.setting_types()}
        before = {k: v for k, v in given.items() if k in self._pretraining_names()}
        noise = {k: v for k, v in given.items() if k in self._correlation_names()}
        found = {k: v for k, v in given.items() if k in self._eigenvalue_names()}
        parts = (inner, after, before, noise, found)
        elsewhere = {name for part in parts for name in part}
        outer = {k: v for k, v in given.items() if k not in elsewhere}
        if self.curvature is not None and inner:
            outer["curvature"] = replace(self.curvature, **inner)
        if self.pretraining is not None and before:
            outer["pretraining"] = replace(self.pretraining, **before)
        if self.correlation is not None and noise:
            outer["correlation"] = replace(self.correlation, **noise)
        if self.eigenvalues is not None and found:
            outer["eigenvalues"] = replace(self.eigenvalues, **found)
        if after:
            outer["chain"] = self.chain.configured(after)
        return replace(self, **outer)

    def setting_names(self) -> list[str]:
        """What a user may set."""
        own = [f.name for f in fields(Recipe) if f.name not in _FIXED]
        inner = [] if self.curvature is None else self.curvature.setting_names()
        before = self._pretraining_names()
        noise = [*self._correlation_names(), *self._eigenvalue_names()]
        return [*own, *inner, *noise, *before, *self.chain.setting_types()]

    def _pretraining_names(self) -> list[str]:
        return [] if self.pretraining is None else self.pretraining.setting_names()

    def _correlation_names(self) -> list[str]:
        return [] if self.correlation is None else self.correlation.setting_names()

    def _eigenvalue_names(self) -> list[str]:
        return [] if self.eigenvalues is None else self.eigenvalues.setting_names()

    @property
    def probes(self) -> bool:
        """Whether it looks for curvature with probes, which may be public data."""
        return self.curvature is not None and not self.curvature.from_releases

    @property
    def takes_public_data(self) -> bool:
        """Whether public data has a use: as probes, or to pretrain on."""
        return self.probes or self.pretrains or self.eigenvalues is not None

    @property
    def is_correlated(self) -> bool:
        """Whether noise of different steps may be: one band is independent noise."""
        return self.correlation is not None and self.correlation.bands != 1

    @property
    def pretrains(self) -> bool:
        """Whether public data is trained on before the first private step."""
        return self.pretraining is not None and self.pretraining.pretrain_epochs > 0

    def search_space(self, mode: str | None = None) -> SearchSpace:
        """What is searched, in the default mode or another.

        Another mode fixes what it sets. For its learning rate, and for that of a recipe
        that declares no search, it is a factor of ten to both sides of the default.
        """
        if mode is None or mode == "default":
            own, declared = self, dict(self.search)
        else:
            own = self._in_mode(mode)
            kept = self.search.keys() - self.modes[mode].keys() - {"learning_rate"}
            declared = {k: v for k, v in self.search.items() if k in kept}
        if "learning_rate" not in declared and (own is not self or not declared):
            rate = own.learning_rate
            near = Range(rate / _FACTOR, rate * _FACTOR, log=True)
            declared = {"learning_rate": near, **declared}
        return declared

    @property
    def oracle(self) -> bool:
        """Whether it takes curvature from the private data, so that nothing holds."""
        return self.curvature is not None and self.curvature.probe == "oracle"

    def clipping_rule(self) -> ClippingRule:
        """The clip rule with its bound."""
        rule = clipping_rule(self.clipping, self.clip_norm)
        if self.curvature is not None:
            rule = self.curvature.clipping(rule)
        return rule

    def make_optimiser(
        self, parameters: Iterable[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """The torch optimiser that acts on the release."""
        options: dict[str, Any] = {
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
        }
        if self.optimiser == "sgd":
            options["momentum"] = self.momentum
        else:
            options["betas"] = (self.momentum, 0.999)
        return _OPTIMISERS[self.optimiser](parameters, **options)

    def remark_on(self, optimizer: torch.optim.Optimizer) -> str | None:
        """What the ledger says of an optimiser that is not the recipe's own.

        A hand-written loop brings its own optimiser, and the guarantee is the same: it
        sees releases alone. What the method does may not be.

        Raises:
            ConfigurationError: the recipe's page rests on its own.
        """
        own, given = _OPTIMISERS[self.optimiser].__name__, type(optimizer).__name__
        if not self._rests_on_its_optimiser:
            other = f"optimiser: {given} in the place of the recipe {self.name}'s {own}"
            return None if given == own else other
        if given != own:
            raise ConfigurationError(
                f"the recipe {self.name!r} rests on {own}, and {given} would make "
                "another method of it",
                f"give make_private a torch.optim.{own}, or choose another recipe",
            )
        groups = optimizer.param_groups
        rates = {float(group["lr"]) for group in groups}
        if self.eigenvalues is not None and (
            len(rates) > 1 or any(group["momentum"] for group in groups)
        ):
            raise ConfigurationError(
                f"the recipe {self.name!r} designs its noise for plain steps of one "
                "learning rate, without momentum",
                "build the optimiser with momentum=0 and one learning rate",
            )
        return None

    @property
    def _rests_on_its_optimiser(self) -> bool:
        """Whether its noise is designed for it, or a transform does what Adam does."""
        designed = self.eigenvalues is not None and self.is_correlated
        return designed or self.chain.reads_noise

    def facts(self) -> dict[str, Any]:
        """Name and settings as JSON values."""
        own = {f.name: getattr(self, f.name) for f in fields(Recipe)}
        settings = {name: value for name, value in own.items() if name not in _FIXED}
        inner = {} if self.curvature is None else self.curvature.facts()
        named = {"name": self.name, "optimiser": self.optimiser}
        before = {} if self.pretraining is None else self.pretraining.facts()
        noise = {} if self.correlation is None else self.correlation.facts()
        found = {} if self.eigenvalues is None else self.eigenvalues.facts()
        return {
            **named, **settings, **inner, **noise, **found, **before,
            **self.chain.facts(),
        }  # fmt: skip

    def facts_of_parts(self) -> dict[str, Any]:
        """Settings of what it does beside clipping and noise, each part by its name."""
        parts = {
            "curvature": self.curvature,
            "pretraining": self.pretraining if self.pretrains else None,
            "eigenvalues": self.eigenvalues,
        }
        return {name: part.facts() for name, part in parts.items() if part is not None}
