"""What is looked at: a model with its verified layers, and where inputs come from.

A :class:`Source` of inputs is public or it is not. Whatever is computed from the
private data itself (the *oracle*) has no guarantee: every result says so by its field
``private``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.curvature import Estimate, Factors, estimate, probe_pass
from curvedp.errors import ConfigurationError
from curvedp.layers import (
    Batch,
    Coverage,
    LayerIO,
    PerExampleLoss,
    cover,
    synthesiser_like,
)
from curvedp.probes import OracleProbe, OwnLabels, Probe, PublicProbe, labels_for
from curvedp.recipes import Curvature
from curvedp.train.datasets import TrainingData
from curvedp.train.losses import per_example_loss
from curvedp.train.probing import choose_labels, choose_probe

__all__ = ["SOURCES", "Source", "Study", "sources_of"]

#: Where inputs may come from, in the order in which plots show them.
SOURCES = ("oracle", "public", "synthetic", "white")


@dataclass(frozen=True)
class Source:
    """Where inputs and labels come from, and how many are drawn.

    Attributes:
        name: one of :data:`SOURCES`, or a name of the caller's own.
        how: probe, labels, batches.
    """

    name: str
    how: Estimate

    @property
    def private(self) -> bool:
        """Whether the private data stays unseen: False for an oracle."""
        return self.how.probe.provenance.is_public

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "private": self.private,
            "probe": self.how.probe.describe(),
            "labels": self.how.labels.describe(),
            "size": self.how.size,
            "batches": self.how.batches,
        }


@dataclass(frozen=True)
class Study:
    """A model whose layers are verified, with its loss.

    Attributes:
        model: looked at as it is when asked; never changed.
        coverage: its verified sites.
        loss: per-example loss, ``(output, targets) -> [B]``.
        loss_name: as the caller gave it, for the label rule.
        template: a batch of zeros in the shapes of the data.
    """

    model: nn.Module
    coverage: Coverage
    loss: PerExampleLoss
    loss_name: Any
    template: Batch

    @classmethod
    def of(cls, model: nn.Module, loss: Any, dataset: Any) -> Study:
        """Verify the model's layers; of the dataset only the shapes are taken."""
        device = next(model.parameters()).device
        template = TrainingData.of(dataset).template(device, with_targets=True)
        checked = per_example_loss(loss)
        coverage = cover(model, synthesiser_like(template, model), checked)
        return cls(model, coverage, checked, loss, template)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters as they are now."""
        named = dict(self.model.named_parameters())
        return {name: named[name].detach() for name in self.coverage.parameters}

    def factors(self, source: Source, seed: int = 0) -> Factors:
        """Curvature factors of every layer from a source, at the present parameters."""
        generator = torch.Generator().manual_seed(seed)
        return estimate(
            self.model, self.coverage.covered, source.how, self.loss, generator
        )

    def batches(self, source: Source, seed: int = 0) -> Iterator[list[LayerIO]]:
        """What every layer sees of the source's batches, one after the other."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(source.how.batches):
            yield probe_pass(
                self.model, self.coverage.covered, source.how, self.loss, generator
            )


def sources_of(
    study: Study,
    private_data: Any,
    public_data: Any = None,
    *,
    curvature: Curvature | None = None,
    probe: Probe | None = None,
    names: tuple[str, ...] | None = None,
) -> dict[str, Source]:
    """The sources to compare, by name, in the order of :data:`SOURCES`.

    ==========  ===================================================================
    oracle      rows of the private data with their own labels: *not private*
    public      rows of the public data; labels as the settings say
    synthetic   the recipe's noise; labels as the settings say
    white       noise without a spectrum; only where it differs from synthetic
    ==========  ===================================================================

    Args:
        study: the model.
        private_data: for the oracle; rows are drawn from it only when that is used.
        public_data: declared public, or None.
        curvature: size and number of batches, spectral power, labels, sharing.
        probe: in the place of the synthetic one.
        names: which of them; all that there are by default.
    """
    settings = curvature or Curvature()
    labels = choose_labels(settings, None, study.loss_name)
    # noise has no labels of its own
    drawn = labels_for(study.loss_name) if isinstance(labels, OwnLabels) else labels

    def noise(kind: Curvature) -> Probe:
        return choose_probe(kind, None, study.template, study.model, None)

    given = probe or noise(replace(settings, probe="synthetic"))
    found = {"oracle": Source("oracle", settings.estimate(
        OracleProbe(private_data), OwnLabels()))}  # fmt: skip
    if public_data is not None:
        public = PublicProbe(public_data)
        found["public"] = Source("public", settings.estimate(public, labels))
    found["synthetic"] = Source("synthetic", settings.estimate(given, drawn))
    white = None if probe is not None else noise(Curvature(spectral_power=0.0))
    if white is not None and white != given:
        found["white"] = Source("white", settings.estimate(white, drawn))
    return found if names is None else _chosen(found, names)


def _chosen(found: dict[str, Source], names: tuple[str, ...]) -> dict[str, Source]:
    for name in names:
        if name not in SOURCES:
            raise ConfigurationError(
                f"unknown source {name!r}", f"choose from: {', '.join(SOURCES)}"
            )
        if name not in found:
            why = {
                "public": "give public data (--public-data)",
                "white": "these inputs have no spectrum: synthetic is white already",
            }.get(name, "leave it out")
            raise ConfigurationError(f"there is no source {name!r} here", why)
    return {name: found[name] for name in found if name in names}
