"""How many pages an engine gets."""

import os
from collections.abc import Sequence

import torch

from verl.config.rollout import RolloutConfig
from verl.distributed.collectives import Axis, max_of
from verl.rollout.embedded.runner import ModelRunner
from verl.rollout.embedded.samples import Sample
from verl.rollout.types import Room
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import RolloutError
from verl.utils.units import GIB

# Share of a CPU machine's memory that the cache may take when num_pages is not given.
CPU_MEMORY_SHARE = 0.25


class CacheRoom:
    """Allocates the pages of a runner, as many as its samples can use and the memory allows.

    Args:
        runner: has the pages.
        config: of the rollout.
        ranks: share the engine, and have as many pages each.
    """

    def __init__(self, runner: ModelRunner, config: RolloutConfig, ranks: Axis) -> None:
        self.reserved = Room()  # for requests yet to come
        self._runner = runner
        self._config = config
        self._ranks = ranks

    def provide_pages(self, samples: Sequence[Sample]) -> None:
        """Allocate the cache, or a larger one where this call can use it."""
        size = self._config.page_size
        # The last drawn token is never fed back, so its key is never kept.
        most = []
        for sample in samples:
            cached = len(sample.group.prompt) + sample.limit - 1
            most.append(ceil_div(cached, size))
        # One more page for each prompt that has samples yet to start.
        prompts = len({id(sample.group) for sample in samples})
        useful = sum(sorted(most, reverse=True)[: self._config.max_num_seqs]) + prompts
        # One page more for each sequence, as for prompts.
        reserved = min(self.reserved.sequences, self._config.max_num_seqs)
        useful = max(useful, reserved * (ceil_div(self.reserved.tokens, size) + 1))
        wanted = self._config.num_pages or min(
            useful, self._most_bytes() // self._runner.page_bytes
        )

        if wanted < max(most, default=0):
            raise RolloutError(
                f"One sample alone may need {max(most)} pages of {size} tokens, the cache has room "
                f"for {wanted} ({wanted * self._runner.page_bytes / GIB:.2f} GiB). "
                f"{self._way_to_pages()}, or lower data.max_response_length."
            )

        if wanted > self._runner.num_pages:
            self._runner.allocate(wanted)

    def _way_to_pages(self) -> str:
        if self._config.num_pages or self._runner.device.type == "cpu":
            return "Raise actor_rollout_ref.rollout.num_pages"
        return (
            "Raise actor_rollout_ref.rollout.gpu_memory_utilization, or lower "
            "actor_rollout_ref.rollout.max_num_seqs: its logits take "
            f"{self._runner.other_bytes / GIB:.2f} GiB"
        )

    def _most_bytes(self) -> int:
        """Return the most bytes that the cache may take, on every rank that shares the engine."""
        return -max_of(-self._most_bytes_here(), self._ranks)

    def _most_bytes_here(self) -> int:
        device = self._runner.device
        if device.type == "cpu":
            return int(CPU_MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        own = self._runner.num_pages * self._runner.page_bytes
        most = max(0, free + unused + own - self._runner.other_bytes)
        return int(self._config.gpu_memory_utilization * most)
