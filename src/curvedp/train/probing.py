"""The probe and the labels of a recipe that whitens, where the user names none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.barrier import Provenance
from curvedp.curvature import Estimate
from curvedp.curvature.products import evaluated
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch, as_call
from curvedp.probes import (
    JSON,
    BernoulliLabels,
    FeatureProbe,
    GaussianLabels,
    ImageProbe,
    LabelRule,
    NormalColumn,
    OracleProbe,
    OwnLabels,
    Probe,
    TokenProbe,
    TokenSpec,
    UniformLabels,
    labels_for,
)
from curvedp.recipes import Curvature, Eigenvalues

#: Keys of inputs that a token probe can make up; the others have defaults in models.
_NEEDED_KEYS = {"input_ids", "attention_mask"}
_TOKEN_KEYS = {*_NEEDED_KEYS, "token_type_ids"}

__all__ = ["choose_labels", "choose_probe", "spectral_probe"]


@dataclass(frozen=True)
class _Signals:
    """Signals ``[B, C, T]`` as images of height 1."""

    images: ImageProbe

    @property
    def provenance(self) -> Provenance:
        return self.images.provenance

    def inputs(self, size: int, generator: torch.Generator) -> Tensor:
        return self.images.inputs(size, generator).squeeze(2)

    def describe(self) -> dict[str, JSON]:
        return self.images.describe()


def choose_probe(
    curvature: Curvature,
    given: Probe | None,
    template: Batch | None,
    model: nn.Module,
    private_data: Any,
    tokenizer: Any = None,
) -> Probe:
    """The probe that the recipe asks for.

    Args:
        curvature: the recipe's settings.
        given: by the user, or None.
        template: a batch of zeros in the inputs' shapes, or None if it is not known.
        model: its embedding tables say how many tokens there are.
        private_data: what an oracle looks at.
        tokenizer: it says which tokens are special; without one, embedding tables say
            what padding is.
    """
    if curvature.probe == "oracle":
        return given or OracleProbe(private_data)
    if given is not None:
        if not given.provenance.is_public:
            raise ConfigurationError(
                "the probe looks at private data, and the recipe's probe is "
                f"{curvature.probe!r}",
                'say probe="oracle": the run then has no guarantee and says so',
            )
        return given
    if curvature.probe == "public":
        raise ConfigurationError(
            "the recipe's probe is 'public', and no public data was given",
            "pass probes=PublicProbe(dataset) with a dataset that is declared public",
        )
    inputs = None if template is None else template.inputs
    probe = None
    if isinstance(inputs, Tensor):
        probe = _synthetic(inputs, curvature, model, tokenizer)
    elif isinstance(inputs, Mapping) and _NEEDED_KEYS <= set(inputs) <= _TOKEN_KEYS:
        probe = _tokens(inputs["input_ids"], inputs, model, tokenizer)
    if probe is None:
        raise ConfigurationError(
            "there is no synthetic probe for inputs of this form",
            "pass probes=: TokenProbe for tokens, PublicProbe(dataset) for public data "
            "of any form (both in curvedp.probes); dp-soap needs no probe",
        )
    return probe


def _synthetic(
    x: Tensor, curvature: Curvature, model: nn.Module, tokenizer: Any
) -> Probe | None:
    shape = tuple(x.shape[1:])
    if not x.is_floating_point():
        return _tokens(x, x, model, tokenizer)
    power = curvature.spectral_power
    if len(shape) == 3:
        if curvature.mean_loss:  # the reproduction of the public code
            return ImageProbe.official(shape)
        return ImageProbe(shape, power)
    if len(shape) == 2:
        return _Signals(ImageProbe((shape[0], 1, shape[1]), power))
    if len(shape) == 1:
        return FeatureProbe(tuple(NormalColumn() for _ in range(shape[0])))
    return None


def _tokens(
    ids: Tensor, inputs: Any, model: nn.Module, tokenizer: Any
) -> TokenProbe | None:
    """Words in the declared shape, of any length where padding is known.

    Without padding all sequences are as long as the declared one.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables or ids.dim() != 2 or ids.is_floating_point():
        return None
    spec = _vocabulary(_table(ids, inputs, model, tables), tokenizer)
    longest = ids.shape[1]
    shortest = longest if spec.pad is None else min(spec.framing + 1, longest)
    masked = isinstance(inputs, Mapping)
    return TokenProbe(spec, (shortest, longest), as_mapping=masked)


def _vocabulary(table: nn.Embedding, tokenizer: Any) -> TokenSpec:
    """The tokenizer's, or all rows of the table but that of its padding."""
    rows, pad = table.num_embeddings, table.padding_idx
    if tokenizer is None:
        return TokenSpec(rows, pad=pad)
    spec = TokenSpec.from_tokenizer(tokenizer)
    if spec.size > rows:
        raise ConfigurationError(
            f"the tokenizer has {spec.size} ids, and the model's table {rows} rows",
            "resize the table to the tokenizer, or pass the tokenizer of this model",
        )
    return spec if spec.pad is not None else replace(spec, pad=pad)


def _table(
    ids: Tensor, inputs: Any, model: nn.Module, tables: Sequence[nn.Embedding]
) -> nn.Embedding:
    """The table that the inputs are looked up in; positions have their own."""
    device = next(model.parameters()).device
    ids = ids.to(device)
    asked: Any = ids
    if isinstance(inputs, Mapping):  # a mask of zeros would leave nothing to attend to
        rest = {k: torch.ones_like(ids) for k in inputs if k == "attention_mask"}
        asked = {"input_ids": ids, **rest}
    args, kwargs = as_call(asked)
    reached: list[nn.Embedding] = []

    def note(table: nn.Module, args: tuple[Any, ...]) -> None:
        if (
            args
            and isinstance(args[0], Tensor)
            and args[0].data_ptr() == ids.data_ptr()
        ):
            assert isinstance(table, nn.Embedding)
            reached.append(table)

    hooks = [table.register_forward_pre_hook(note) for table in tables]
    try:
        with evaluated(model), torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = {table.num_embeddings for table in reached or tables}
    if not reached and len(sizes) > 1:
        raise ConfigurationError(
            "the model has embedding tables of "
            f"{', '.join(map(str, sorted(sizes)))} rows, and which of them the inputs "
            "are looked up in does not show",
            "pass probes=curvedp.probes.TokenProbe(TokenSpec(vocabulary), ...)",
        )
    return min(reached or tables, key=lambda table: table.num_embeddings)


def choose_labels(
    curvature: Curvature, given: LabelRule | None, loss: Any
) -> LabelRule:
    """The label rule that the recipe asks for."""
    if given is not None:
        return given
    if curvature.labels == "uniform":
        return _uniform_labels(loss)
    return OwnLabels() if curvature.labels == "own" else labels_for(loss)


def _uniform_labels(loss: Any) -> LabelRule:
    """Labels that ignore the model, of the kind that the loss takes."""
    try:
        usual = labels_for(loss)
    except ConfigurationError:  # one of the user's own: classes, as was asked for
        return UniformLabels()
    if isinstance(usual, BernoulliLabels):
        return BernoulliLabels(0.5)
    if isinstance(usual, GaussianLabels):
        raise ConfigurationError(
            "uniform labels are classes, and the loss is that of a regression",
            'set labels = "model"',
        )
    return UniformLabels()


def spectral_probe(
    eigenvalues: Eigenvalues,
    given: Probe | None,
    template: Batch | None,
    model: nn.Module,
    labels: LabelRule | None,
    loss: Any,
    tokenizer: Any = None,
) -> Estimate:
    """What a spectrum is looked for with, at the recipe's wish. Never private data."""
    as_asked = Curvature(probe=eigenvalues.spectrum_probe)
    probe = choose_probe(as_asked, given, template, model, None, tokenizer)
    return eigenvalues.estimate(probe, choose_labels(as_asked, labels, loss))
