"""One of every probe and rule, small, and the generators that the tests share."""

import torch
from torch.utils.data import TensorDataset

from curvedp.barrier import Provenance
from curvedp.probes import (
    CategoryColumn,
    EmbeddingTokenProbe,
    FeatureProbe,
    GeneratedTokenProbe,
    HashedDocumentProbe,
    Hashing,
    ImageProbe,
    NormalColumn,
    OracleProbe,
    PublicProbe,
    RangeColumn,
    TokenProbe,
    TokenSpec,
)

SPEC = TokenSpec(size=30, pad=0, cls=1, sep=2, unk=3)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def language_model(vocabulary=30, seed=5):
    """Logits that depend on the last id alone: a Markov chain as a language model."""
    table = torch.randn(vocabulary, vocabulary, generator=seeded(seed))
    return lambda ids: table[ids]


def matrix(rows=30, width=4, seed=6):
    return torch.randn(rows, width, generator=seeded(seed)) + 1


def pairs(rows=20):
    inputs = torch.arange(rows * 3.0).reshape(rows, 3)
    return TensorDataset(inputs, torch.arange(rows))


#: name -> (probe, provenance)
PROBES = {
    "images": (ImageProbe((3, 8, 5), power=2.0), Provenance.SYNTHETIC),
    "images official": (ImageProbe.official((1, 6, 6)), Provenance.SYNTHETIC),
    "tokens": (TokenProbe(SPEC, (3, 9)), Provenance.SYNTHETIC),
    "ids": (TokenProbe(SPEC, (3, 9), "uniform", False), Provenance.SYNTHETIC),
    "embedded": (
        EmbeddingTokenProbe.from_matrix(matrix(), SPEC, (3, 9)),
        Provenance.PUBLIC,
    ),
    "embedded, released": (
        EmbeddingTokenProbe.from_matrix(
            matrix(), SPEC, (3, 9), source=Provenance.RELEASED, as_mapping=False
        ),
        Provenance.RELEASED,
    ),
    "generated": (
        GeneratedTokenProbe(language_model(), SPEC, (3, 9)),
        Provenance.PUBLIC,
    ),
    "features": (FeatureProbe(7), Provenance.SYNTHETIC),
    "columns": (
        FeatureProbe((NormalColumn(), RangeColumn(0, 1), CategoryColumn(3))),
        Provenance.SYNTHETIC,
    ),
    "documents": (
        HashedDocumentProbe(Hashing(16), (2, 9), words=50),
        Provenance.SYNTHETIC,
    ),
    "public": (PublicProbe(pairs(), name="digits"), Provenance.PUBLIC),
    "public tensor": (PublicProbe(torch.randn(9, 2)), Provenance.PUBLIC),
    "oracle": (OracleProbe(pairs()), Provenance.ORACLE),
}
