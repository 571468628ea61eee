"""Settings of recipes that whiten: probe, map, back-map, refresh. All are declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from curvedp.clipping import ClippingRule, CurvatureClipping
from curvedp.curvature import Estimate, Refresh
from curvedp.curvature.estimate import MOMENTS
from curvedp.curvature.factors import SHARING
from curvedp.curvature.squares import SQUARES
from curvedp.errors import ConfigurationError
from curvedp.probes import LabelRule, Probe
from curvedp.recipes.types import check_choice, check_least, check_types
from curvedp.whitening import (
    Damping,
    FloorSchedule,
    JointWhitening,
    KroneckerWhitening,
    SubspaceWhitening,
)
from curvedp.whitening.build import SIDES

__all__ = ["BACK_MAPS", "Curvature"]

BACK_MAPS = ("none", "natural", "inverse")
CLIP_ORDERS = ("before", "in", "after")
PROBES = ("synthetic", "public", "oracle", "releases", "private")
LABELS = ("model", "uniform", "own")
CLAMPS = ("off", "matched", "printed", "none")
_CHOICES = {
    "probe": PROBES,
    "labels": LABELS,
    "sharing": SHARING,
    "side": SIDES,
    "back_map": BACK_MAPS,
    "clip_order": CLIP_ORDERS,
    "clamp": CLAMPS,
    "moments": MOMENTS,
}
_LEAST = {"probe_size": 1, "probe_batches": 1, "refresh": 0, "rank": 0, "basis": 1}
#: A clamped map has both sides, all eigenpairs and the root 1/2; no other damping.
_WHEN_CLAMPED: dict[str, Any] = {
    "side": "both",
    "rank": 0,
    "exponent": 0.5,
    "damping": 0.05,
    "product": False,
    "match_scale": False,
    "absolute_damping": False,
    "leave_out": "",
    "diagonal": False,
}
#: A diagonal map has no eigenpairs, and one scale of its own for every coordinate.
_WHEN_DIAGONAL: dict[str, Any] = {
    "side": "a",
    "rank": 32,
    "product": False,
    "match_scale": False,
}
#: Squares of gradients have no factors, and make a diagonal map of their own.
_WHEN_SQUARES: dict[str, Any] = {
    **_WHEN_DIAGONAL,
    "sharing": "expand",
    "mean_loss": False,
    "diagonal": False,
    "clamp": "off",
}
#: A subspace has no eigenvalues; what it scaled is scaled back after the noise.
_WHEN_SUBSPACE: dict[str, Any] = {
    **_WHEN_SQUARES,
    "exponent": 0.5,
    "damping": 0.05,
    "absolute_damping": False,
    "leave_out": "",
    "back_map": "inverse",
    "clip_order": "in",
}
#: What is learnt from releases needs no probes.
_WHEN_RELEASED: dict[str, Any] = {
    "labels": "model",
    "spectral_power": 3.0,
    "probe_size": 256,
    "probe_batches": 4,
    "sharing": "expand",
    "mean_loss": False,
    "moments": "kronecker",
    "clamp": "off",
    "clip_order": "in",
}
#: Measured on the private data itself: no probes either, and a matrix for each side.
_WHEN_MEASURED: dict[str, Any] = {
    **{k: v for k, v in _WHEN_RELEASED.items() if k not in ("clamp", "clip_order")},
    "diagonal": False,
}
#: Without a floor, and with one that stays where it is.
_WITHOUT_FLOOR = {
    "plain_step": 2.0,
    "floor_base": 0.01,
    "floor_warm_up": 0.1,
    "floor_power": 10.0,
}
_WITHOUT_MEASURING = {"curvature_share": 0.2, "input_bound": 1.0, "output_bound": 1.0}
_WITHOUT_SUBSPACE = {"basis": 50, "residual_clip": 1.0, "residual_share": 0.5}


@dataclass(frozen=True)
class Curvature:
    """How gradients are reshaped before they are clipped.

    Attributes:
        probe: "synthetic" noise of the inputs' shape, "public" data that the caller
            gives, "releases": what was released so far, with the noise taken out of
            its moments; "private": the private data, measured with noise and paid for
            with a share of the clip bound (:mod:`curvedp.clipping.measured`); or
            "oracle": the private data itself, for research. A run with an oracle has no
            guarantee and says so.
        labels: "model" (drawn from its predictions), "uniform", or "own" (of public
            data).
        spectral_power: of synthetic images.
        probe_size: examples of a probe batch.
        probe_batches: how many of them.
        refresh: steps between two estimates; 0 keeps the first one.
        decay: weight of the past in a moving average of factors: of estimates, or of
            releases.
        sharing: "expand" or "reduce".
        side: "a", "g" or "both".
        exponent: p of the root; 1/2 whitens.
        damping: relative to the mean eigenvalue.
        rank: eigenpairs kept, fewer in a layer of few outputs; 0 keeps all.
        product: whiten channels and kernel places of a convolution apart.
        match_scale: keep the mean squared norm of probe gradients layer by layer.
        back_map: what the noisy sum goes through: "none", "natural" (the adjoint) or
            "inverse".
        clip_order: clip and add noise "in" the whitened space; or, of a natural
            gradient, "before" the map (it then acts on the noisy sum) or "after" it.
        clamp: "off" for a Kronecker map; otherwise DP-NGD's joint map with the floor
            "matched", as "printed", or "none".
        plain_step: ``eta_sgd C_sgd`` that the floor of a clamp is matched to.
        floor_base: share of the safe floor on the schedule's plateau; 1 keeps the floor
            where it is. Otherwise it moves at every step (eq. 18).
        floor_warm_up: share of the steps in which it falls to the plateau, T1 / T.
        floor_power: p of its way back up.
        absolute_damping: take the damping as it is; for reproduction.
        mean_loss: probe with the mean loss; for reproduction.
        leave_out: layers that stay unwhitened, separated by commas.
        diagonal: scale every coordinate by itself, by the root of its second moment:
            the diagonal of the Kronecker product, with both sides in it. Beside
            ``probe="public"`` it is close to AdaDPS, with squares of per-example
            gradients.
        moments: what probes estimate: "kronecker" factors; or, for a diagonal map,
            "batch-squares" (of mean gradients of probe batches) or "example-squares";
            or the "subspace" that gradients lie in, which is clipped apart from the
            rest (GEP). ``clip_norm`` is then that of the embedding.
        basis: dimension of the subspace, in each layer.
        residual_clip: clip norm of the rest, as a multiple of the embedding's.
        residual_share: of the squared bound that the rest has; 0 leaves it out.
        curvature_share: of the squared bound that private factors have.
        input_bound: root mean square of a layer's inputs up to which an example counts
            in full in a private factor.
        output_bound: the same for the length of the loss's gradient at its outputs.
    """

    probe: str = "synthetic"
    labels: str = "model"
    spectral_power: float = 3.0
    probe_size: int = 256
    probe_batches: int = 4
    refresh: int = 100
    decay: float = 0.0
    sharing: str = "expand"
    side: str = "a"
    exponent: float = 0.5
    damping: float = 0.05
    rank: int = 32
    product: bool = False
    match_scale: bool = False
    back_map: str = "none"
    clip_order: str = "in"
    clamp: str = "off"
    plain_step: float = 2.0
    floor_base: float = 0.01
    floor_warm_up: float = 0.1
    floor_power: float = 10.0
    absolute_damping: bool = False
    mean_loss: bool = False
    leave_out: str = ""
    diagonal: bool = False
    moments: str = "kronecker"
    basis: int = 50
    residual_clip: float = 1.0
    residual_share: float = 0.5
    curvature_share: float = 0.2
    input_bound: float = 1.0
    output_bound: float = 1.0

    def __post_init__(self) -> None:
        check_types(self.facts(), {f.name: str(f.type) for f in fields(Curvature)})
        for name, known in _CHOICES.items():
            check_choice(name, getattr(self, name), known)
        for name, least in _LEAST.items():
            check_least(name, getattr(self, name), least)
        check_least("spectral_power", self.spectral_power, 0.0)
        self._floor_schedule(1)
        self.schedule()
        Damping(self.damping)
        self._check_order()
        if self.moments in SQUARES:
            way_out = "moments = 'kronecker'"
            self._refuse_others(_WHEN_SQUARES, f"moments = {self.moments!r}", way_out)
        if self.probe == "releases":
            way_out = "probe = 'synthetic'"
            self._refuse_others(_WHEN_RELEASED, "probe = 'releases'", way_out)
        self._check_measuring()
        self._check_floor()
        if self.moments == "subspace":
            way_out = "moments = 'kronecker'"
            self._refuse_others(_WHEN_SUBSPACE, "moments = 'subspace'", way_out)
        else:
            way_out = "moments = 'subspace'"
            beside = f"moments = {self.moments!r}"
            self._refuse_others(_WITHOUT_SUBSPACE, beside, way_out)
        self.whitening(steps=1, step_length=1.0)
        if self.clamp != "off":
            way_out = "clamp = 'off' for a Kronecker map"
            fixed = dict(_WHEN_CLAMPED)
            if self.probe == "private":  # what is not measured has no map
                del fixed["leave_out"]
            self._refuse_others(fixed, f"clamp = {self.clamp!r}", way_out)
        elif self.diagonal:
            way_out = "diagonal = False for a Kronecker map"
            self._refuse_others(_WHEN_DIAGONAL, "diagonal = True", way_out)

    def _check_measuring(self) -> None:
        if self.probe != "private":
            beside, way_out = f"probe = {self.probe!r}", "probe = 'private'"
            self._refuse_others(_WITHOUT_MEASURING, beside, way_out)
            return
        way_out = "probe = 'synthetic'"
        self._refuse_others(_WHEN_MEASURED, "probe = 'private'", way_out)
        if not self.refresh:
            raise ConfigurationError(
                "refresh = 0 keeps the map of the first step, and before it nothing "
                "was measured",
                "give a number of steps after which a map is made of what was measured",
            )

    def _check_floor(self) -> None:
        if self.clamp in ("off", "none"):
            beside, way_out = f"clamp = {self.clamp!r}", "clamp = 'matched'"
            self._refuse_others(_WITHOUT_FLOOR, beside, way_out)
        elif self.floor_base == 1:
            fixed = {k: _WITHOUT_FLOOR[k] for k in ("floor_warm_up", "floor_power")}
            self._refuse_others(fixed, "floor_base = 1", "a lower floor_base")

    def _refuse_others(
        self, fixed: Mapping[str, Any], beside: str, way_out: str
    ) -> None:
        """Refuse settings that would be without effect."""
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ConfigurationError(
                    f"{name} = {getattr(self, name)!r} has no effect beside {beside}",
                    f"set {name} = {value!r}, or {way_out}",
                )

    def _check_order(self) -> None:
        if self.clip_order == "in":
            return
        if self.back_map != "natural" or self.exponent > 0.5:
            raise ConfigurationError(
                f"clip_order = {self.clip_order!r} is about the natural gradient, the "
                f"map applied twice; back_map is {self.back_map!r}, the exponent "
                f"{self.exponent:g}",
                "set back_map = 'natural' and an exponent of up to 0.5, or clip_order "
                "= 'in'",
            )

    @property
    def read_out(self) -> str:
        """What the noisy sum goes through; see :func:`curvedp.update.read_out`."""
        return {"before": "forward", "after": "none"}.get(
            self.clip_order, self.back_map
        )

    @staticmethod
    def setting_names() -> list[str]:
        """What a user may set."""
        return [f.name for f in fields(Curvature)]

    def facts(self) -> dict[str, Any]:
        """All settings as JSON values."""
        return {name: getattr(self, name) for name in self.setting_names()}

    def clipping(self, rule: ClippingRule) -> ClippingRule:
        """The rule, with what is measured beside the gradient.

        Refuses one that cannot clip the parts of this map by themselves.
        """
        if self.probe == "private":
            return CurvatureClipping(
                rule.bound,
                rule,
                self.curvature_share,
                self.input_bound,
                self.output_bound,
            )
        whitening = self.whitening(steps=1, step_length=1.0)
        if isinstance(whitening, SubspaceWhitening):
            for share in whitening.shares:
                rule.of_part(share)
        return rule

    @property
    def from_releases(self) -> bool:
        """Whether releases alone teach it, so that it needs no probes."""
        return self.probe in ("releases", "private")

    @property
    def sides(self) -> tuple[str, ...]:
        """Factors that the map is made of."""
        return ("a", "g") if self.side == "both" else (self.side,)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names in ``leave_out``."""
        return tuple(n.strip() for n in self.leave_out.split(",") if n.strip())

    def schedule(self) -> Refresh:
        """When factors are estimated."""
        return Refresh(self.refresh or None, self.decay)

    def estimate(self, probe: Probe, labels: LabelRule) -> Estimate:
        """How they are estimated, with these inputs and labels."""
        return Estimate(
            probe,
            labels,
            self.probe_size,
            self.probe_batches,
            self.sharing,
            self.mean_loss,
            self.moments,
            self.basis,
        )

    def whitening(
        self, steps: int, step_length: float
    ) -> KroneckerWhitening | JointWhitening | SubspaceWhitening:
        """How a map is made of factors.

        Args:
            steps: of the run, for the schedule of a clamp's floor.
            step_length: ``eta C`` of this recipe, which a clamp bounds.
        """
        if self.moments == "subspace":
            return SubspaceWhitening(self.residual_clip, self.residual_share)
        if self.clamp == "off":
            return KroneckerWhitening(
                side=self.side,
                exponent=self._map_exponent,
                damping=Damping(self.damping, relative=not self.absolute_damping),
                rank=self.rank or None,
                product=self.product,
                match_scale=self.match_scale,
                leave_out=self.left_out,
                diagonal=self.diagonal,
            )
        if not self.plain_step > 0:
            raise ConfigurationError(
                f"plain_step must be positive, not {self.plain_step!r}",
                "it is learning rate times clip norm of plain DP-SGD",
            )
        if not step_length > 0:
            raise ConfigurationError(
                "the learning rate is 0 when the run is attached, and the floor of "
                "DP-NGD's curvature follows it",
                "attach with the largest rate, and make the scheduler afterwards",
            )
        return JointWhitening(
            step_length / self.plain_step,
            matched=self.clamp == "matched",
            share=self._floor_schedule(steps).share,
            clamp=self.clamp != "none",
            exponent=self._map_exponent,
        )

    def _floor_schedule(self, steps: int) -> FloorSchedule:
        return FloorSchedule(
            steps, self.floor_warm_up, self.floor_power, self.floor_base
        )

    @property
    def moves(self) -> bool:
        """Whether the map is another one at every step, refreshed or not."""
        return self.clamp in ("matched", "printed") and self.floor_base < 1

    @property
    def _map_exponent(self) -> float:
        """The map applied twice has twice the exponent: it is symmetric."""
        return self.exponent if self.clip_order == "in" else 2 * self.exponent
