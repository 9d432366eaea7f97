"""Watches that nobody who works for one card touches a tensor of another: a device named twice would hide it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from offload_runtime.memory import current_card


class CardWatch(TorchDispatchMode):
    """Knows of every tensor that is made meanwhile, in this thread, which card it was made for, and raises
    `AssertionError` where an operation for another card reads or writes it. Views read nothing, and hops are between
    cards. Integers of 64 bits are not watched: attention on a CPU lays its tiles out by some that all cards share.

    Attributes:
        touched: Operations for each card.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, tuple[StorageWeakRef, int]] = {}  # by the address of a storage, while it is there
        self.touched: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, card = kwargs or {}, current_card()
        is_view = func.is_view
        inputs = list(_tensors((args, kwargs)))
        if card is not None and not is_view:
            self.touched[card] = self.touched.get(card, 0) + bool(inputs)
            for tensor in inputs:
                owner = None if tensor.dtype == torch.int64 else self._owner(tensor)
                assert owner in (None, card), f"{func} for card {card} touches a tensor {list(tensor.shape)} of {owner}"
        found = func(*args, **kwargs)
        there = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in inputs}
        for tensor in _tensors(found):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in there and card is not None:
                self._owners[reference.cdata] = reference, card
        return found

    def _owner(self, tensor: torch.Tensor) -> int | None:
        reference, card = self._owners.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, None))
        return None if reference is None or reference.expired() else card


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, torch.Tensor))
