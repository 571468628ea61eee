"""Inputs and labels from which curvature is found without looking at private data.

A :class:`Probe` makes inputs, a :class:`LabelRule` labels, and :func:`draw` joins them.
All of them draw from the generator that they are given and from nothing else.
"""

from curvedp.probes.base import JSON, LabelledProbe, Probe, StagedProbe
from curvedp.probes.documents import HashedDocumentProbe, Hashing
from curvedp.probes.drawing import ProbeDraw, draw
from curvedp.probes.embedded import EmbeddingTokenProbe
from curvedp.probes.features import (
    CategoryColumn,
    FeatureProbe,
    NormalColumn,
    RangeColumn,
)
from curvedp.probes.generated import GeneratedTokenProbe
from curvedp.probes.images import ImageProbe, Normalisation
from curvedp.probes.labels import (
    BernoulliLabels,
    GaussianLabels,
    LabelRule,
    ModelLabels,
    OwnLabels,
    UniformLabels,
    labels_for,
)
from curvedp.probes.laws import RankLaw
from curvedp.probes.public import OracleProbe, PublicProbe
from curvedp.probes.tokens import TokenProbe
from curvedp.probes.vocabulary import TokenSpec

__all__ = [
    "JSON",
    "BernoulliLabels",
    "CategoryColumn",
    "EmbeddingTokenProbe",
    "FeatureProbe",
    "GaussianLabels",
    "GeneratedTokenProbe",
    "HashedDocumentProbe",
    "Hashing",
    "ImageProbe",
    "LabelRule",
    "LabelledProbe",
    "ModelLabels",
    "NormalColumn",
    "Normalisation",
    "OracleProbe",
    "OwnLabels",
    "Probe",
    "ProbeDraw",
    "PublicProbe",
    "RangeColumn",
    "RankLaw",
    "StagedProbe",
    "TokenProbe",
    "TokenSpec",
    "UniformLabels",
    "draw",
    "labels_for",
]
