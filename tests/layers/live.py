"""Bytes that live tensors take, counted as operations make them: a CPU has no record.

Storages that were there before, and scratch memory inside of one operation, are not
counted.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """Inside of it, every new storage counts until it is freed.

    Args:
        known: tensors whose memory does not count, whenever it was made.
    """

    def __init__(self, known=()):
        super().__init__()
        self._known = {_identity(x) for x in known}
        self._made = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_identity(x) for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            identity = _identity(x)
            if identity not in given | self._known | self._made.keys():
                storage = x.untyped_storage()
                self._made[identity] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self):
        """Bytes that are live at this moment."""
        alive = {n: (r, b) for n, (r, b) in self._made.items() if not r.expired()}
        self._made = alive
        return sum(size for _, size in alive.values())


def _tensors(values):
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


def _identity(x):
    return x.untyped_storage()._cdata
