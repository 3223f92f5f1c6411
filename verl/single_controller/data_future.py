"""Batches that workers have not given yet, in the form of verl 0.5; a call that does not block
gives a GroupFuture."""

import functools
from abc import ABCMeta
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.calls import GroupFuture
from verl.utils.imports import require


@dataclass(eq=False)
class DataProtoFuture(metaclass=ABCMeta):
    """A DataProto some time: `collect_fn` joins what `futures` give, `dispatch_fn` takes a part of
    that. A GroupFuture, which a call that does not block gives, counts as one.

    As the argument of a call on a group it is read where the method materialises futures. `futures`
    are Ray's object references, and what other calls gave without blocking.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None

    @staticmethod
    def concat(data: Sequence[Any]) -> "DataProtoFuture":
        """All rows of these futures, one after the other."""
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """`chunks` futures of the parts that `DataProto.chunk` will cut."""
        return [
            DataProtoFuture(
                self.collect_fn, self.futures, functools.partial(self._part, chunks, number)
            )
            for number in range(chunks)
        ]

    def get(self) -> DataProto:
        """Wait for the batch. ValueError where a future gives anything but a DataProto."""
        pieces = [_value(future) for future in self.futures]
        if strange := {
            type(piece).__name__ for piece in pieces if not isinstance(piece, DataProto)
        }:
            raise ValueError(
                "The futures of a DataProtoFuture must give a DataProto each, got "
                f"{sorted(strange)}."
            )
        batch = self.collect_fn(pieces)
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)

    def _part(self, chunks: int, number: int, batch: DataProto) -> DataProto:
        whole = batch if self.dispatch_fn is None else self.dispatch_fn(batch)
        return whole.chunk(chunks)[number]


DataProtoFuture.register(GroupFuture)


def _value(future: Any) -> Any:
    if isinstance(future, GroupFuture | DataProtoFuture):
        return future.get()
    return require("ray", "A future of Ray", "pip install ray").get(future)
