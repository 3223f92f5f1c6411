"""Start the process that forks helpers of tools once for all tests of a file."""

from collections.abc import Iterator

import pytest

from verl.agents.tools import processes
from verl.agents.tools.nursery import Nursery


class _Kept(Nursery):
    """Stays after the end of a set of tools, for the next one."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def one_nursery() -> Iterator[None]:
    """Use one nursery for all sets of tools, because its imports take a third of a second."""
    nursery = _Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Nursery", lambda: nursery)
        yield
    nursery.end()
