"""Start ranks on GPUs of their own, shared by the tests of a file."""

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.ranks import Ranks
from verl.distributed.mesh import close_process_group


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    ranks = Ranks(2)
    yield ranks
    ranks.close()
    close_process_group()
