"""Batches that workers have not returned yet, in the form of verl 0.5."""

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
    """A future DataProto: `collect_fn` joins the values of `futures`, `dispatch_fn` takes a part.

    `futures` are Ray's object references, or the results of calls that do not block. Such a result,
    a GroupFuture, is also an instance of this class. As an argument of a call on a group, a future
    is read if the method materializes futures.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None

    @staticmethod
    def concat(data: Sequence[Any]) -> "DataProtoFuture":
        """Return a future of all rows of these futures, one after the other."""
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Return a future for each of the `chunks` parts that `DataProto.chunk` will cut."""
        parts: list[DataProtoFuture] = []
        for number in range(chunks):
            cut = functools.partial(self._part, chunks, number)
            parts.append(DataProtoFuture(self.collect_fn, self.futures, cut))
        return parts

    def get(self) -> DataProto:
        """Wait for the batch. Raises ValueError if a future's value is no DataProto."""
        pieces = [_value(future) for future in self.futures]
        wrong = {type(piece).__name__ for piece in pieces if not isinstance(piece, DataProto)}
        if wrong:
            raise ValueError(
                f"The futures of a DataProtoFuture must give a DataProto each, got {sorted(wrong)}."
            )
        return self._taken_from(self.collect_fn(pieces))

    def _part(self, chunks: int, number: int, batch: DataProto) -> DataProto:
        return self._taken_from(batch).chunk(chunks)[number]

    def _taken_from(self, batch: DataProto) -> DataProto:
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)


DataProtoFuture.register(GroupFuture)


def _value(future: Any) -> Any:
    if isinstance(future, DataProtoFuture):
        return future.get()
    return require("ray", "A future of Ray", "pip install ray").get(future)
