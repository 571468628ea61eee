"""What can be replaced without asking: layers that mix examples, for ones that do not.

Every change is listed; whatever is not listed stays as it was. A change that needs a
decision (a layout, an unused layer, a shared weight) is left to the user.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from torch import nn

from curvedp.errors import ConfigurationError

__all__ = ["Change", "copied", "fix", "repair"]

#: Groups of a GroupNorm that takes the place of a BatchNorm, at most.
MOST_GROUPS = 32
#: Channels of a group, at least. With one, a bias before the layer has no effect, and
#: channels can no longer be compared.
LEAST_CHANNELS = 2
#: The same where a layer may have no positions to average over (``[B, C]``).
LEAST_CHANNELS_FLAT = 8

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class Change:
    """One replacement.

    Attributes:
        name: the module in the model.
        before: what stood there.
        after: what stands there now.
        remark: what the user should know about it.
    """

    name: str
    before: str
    after: str
    remark: str = ""

    def to_json(self) -> dict[str, str]:
        """As JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.name}: {self.before} -> {self.after}"
        return f"{text} ({self.remark})" if self.remark else text


def fix(model: nn.Module) -> tuple[nn.Module, list[Change]]:
    """A copy of the model with everything replaced that can be, and the list of it.

    - BatchNorm becomes GroupNorm; weights are copied, running statistics dropped. One
      that is frozen and in evaluation mode stays.
    - InstanceNorm loses its running statistics.
    - In-place activations and dropout become out-of-place.
    - Dropout inside ``nn.MultiheadAttention`` is set to 0.
    - ``max_norm`` and ``scale_grad_by_freq`` of embeddings are removed.

    Build the optimiser from the parameters of the copy.
    """
    return repair(copied(model))


def repair(
    model: nn.Module, only: Iterable[str] | None = None
) -> tuple[nn.Module, list[Change]]:
    """Replace in the model itself, in all modules or in those named."""
    wanted = None if only is None else set(only)
    changes: list[Change] = []
    replaced: dict[nn.Module, nn.Module] = {}
    root = model
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if wanted is not None and name not in wanted:
            continue
        if module not in replaced:  # one module may stand at several places
            found = _repaired(module)
            replaced[module] = module if found is None else found[0]
            if found is not None:
                changes.append(Change(name or "(the model itself)", *found[1:]))
        if replaced[module] is not module:
            if not name:
                root = replaced[module]
            else:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, replaced[module])
    return root, changes


def copied(model: nn.Module) -> nn.Module:
    """A deep copy; the model that was given is never touched."""
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"the model cannot be copied: {str(error).splitlines()[0]}",
            "keep tensors that need gradients out of its attributes",
        ) from error


_Repaired = tuple[nn.Module, str, str, str]


def _repaired(module: nn.Module) -> _Repaired | None:
    """The module that takes the place, with words for before, after and a remark."""
    for way in _WAYS:
        found = way(module)
        if found is not None:
            return found
    return None


def _batch_norm(module: nn.Module) -> _Repaired | None:
    if type(module) not in _BATCH_NORMS:
        return None
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    trainable = any(p.requires_grad for p in module.parameters())
    channels = module.num_features
    flat = isinstance(module, nn.BatchNorm1d)  # its inputs may be [B, C]
    if not (module.training or trainable) or channels < (2 if flat else 1):
        return None
    groups = _groups(channels, LEAST_CHANNELS_FLAT if flat else LEAST_CHANNELS)
    norm = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    norm.training = module.training
    for own, p in module.named_parameters():
        target: nn.Parameter = getattr(norm, own)
        target.data = p.detach().clone()
        target.requires_grad_(p.requires_grad)
    before = f"{type(module).__name__}({channels})"
    remark = ""
    if module.track_running_stats:
        remark = "weights copied, running statistics dropped"
    return norm, before, f"GroupNorm({groups}, {channels})", remark


def _groups(channels: int, least: int) -> int:
    """The largest divisor up to 32 that leaves enough channels to a group."""
    fitting = [
        g
        for g in range(1, min(MOST_GROUPS, channels) + 1)
        if channels % g == 0 and channels // g >= least
    ]
    return max(fitting, default=1)


def _instance_norm(module: nn.Module) -> _Repaired | None:
    if type(module) not in _INSTANCE_NORMS:
        return None
    assert isinstance(module, nn.modules.instancenorm._InstanceNorm)
    if not module.track_running_stats:
        return None
    module.track_running_stats = False
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(module, buffer, None)
    return module, "track_running_stats=True", "track_running_stats=False", ""


def _in_place(module: nn.Module) -> _Repaired | None:
    if getattr(module, "inplace", None) is not True:
        return None
    module.inplace = False  # type: ignore[assignment]
    kind = type(module).__name__
    return module, f"{kind}(inplace=True)", f"{kind}(inplace=False)", ""


def _attention(module: nn.Module) -> _Repaired | None:
    if not isinstance(module, nn.MultiheadAttention) or not module.dropout:
        return None
    before = module.dropout
    module.dropout = 0.0
    remark = "dropout outside of the attention stays"
    return module, f"attention dropout={before:g}", "dropout=0", remark


def _embedding(module: nn.Module) -> _Repaired | None:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    before, after = [], []
    if module.max_norm is not None:
        before.append(f"max_norm={module.max_norm:g}")
        after.append("max_norm=None")
        module.max_norm = None
    if module.scale_grad_by_freq:
        before.append("scale_grad_by_freq=True")
        after.append("scale_grad_by_freq=False")
        module.scale_grad_by_freq = False
    return (module, ", ".join(before), ", ".join(after), "") if before else None


_WAYS: tuple[Callable[[nn.Module], _Repaired | None], ...] = (
    _batch_norm,
    _instance_norm,
    _in_place,
    _attention,
    _embedding,
)


def in_place_modules(model: nn.Module) -> Iterator[str]:
    """Names of the modules that overwrite their input."""
    for name, module in model.named_modules():
        if getattr(module, "inplace", None) is True:
            yield name
