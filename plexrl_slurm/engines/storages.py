"""Memory of tensors that keep their shapes, views and names while it is given back."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def distinct(tensors: Iterable[Tensor]) -> list[Any]:
    """Storages of some tensors that take memory, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, shared ones once."""
    return sum(storage.nbytes() for storage in distinct(tensors))


class Released:
    """Storages without memory; what was in them is gone."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Give the memory back, also where several tensors are views of it."""
        self._sizes = [(storage, storage.nbytes()) for storage in distinct(tensors)]
        for storage, _ in self._sizes:
            storage.resize_(0)

    @property
    def bytes(self) -> int:
        """What :meth:`take` will take."""
        return sum(size for _, size in self._sizes)

    def take(self) -> None:
        """Take as much memory again; it holds zeros."""
        for storage, size in self._sizes:
            storage.resize_(size)
            storage.fill_(0)
        self._sizes.clear()
