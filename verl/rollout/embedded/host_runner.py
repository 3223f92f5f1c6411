"""The runner of a CPU: it computes every step when it is called."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.models.attention import Facts
from verl.models.logprobs import Head
from verl.models.vision import reads_pictures
from verl.rollout.embedded import host_lanes, invariant
from verl.rollout.embedded.attention import (
    DecodeStep,
    LayerPages,
    Step,
    plan_chunks,
)
from verl.rollout.embedded.host_decoders import StackedDecoder, TorchDecoder
from verl.rollout.embedded.host_lanes import Lane, Lanes
from verl.rollout.embedded.host_rows import KeyRows, most_bytes, words
from verl.rollout.embedded.runner import Draws, ModelRunner
from verl.rollout.embedded.samples import Answer, IdLists, IntArray
from verl.rollout.embedded.scheduler import STEPS_AT_ONCE, Scheduler
from verl.rollout.embedded.several import Fed, right_draws
from verl.rollout.sampling import row_keys, sample
from verl.rollout.twin import ModelTwin
from verl.rollout.types import SamplingParams

# The most (row, token) pairs with logits in memory at once: 256 MiB in fp32.
ALIVE_LOGITS = 1 << 26
# Models up to this size keep a second copy of their weights, laid out for fast decode steps.
STACKED_BYTES = 1 << 28
# So many new tokens of one sequence are worth all of torch's threads.
LONG_EXTENSION = 256
# `KeyRows` are kept where they can never take more than this.
ROWS_BYTES = 1 << 31


class InvariantDecodeStep(DecodeStep):
    """A decode step in which each row's bits depend on its own keys alone."""

    def attend(self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> Tensor:
        """Implement `Step.attend`."""
        self.store(pages, k, v)
        parts = []
        for rows, table in self.chunks:
            # (rows, W, Hk, page_size, D) -> (rows, Hk, W * page_size, D)
            gathered = []
            for cache in pages.tensors:
                gathered.append(cache[table].transpose(1, 2).flatten(2, 3))
            keys, values = gathered
            last = self.positions[rows]
            parts.append(invariant.decode_attention(q[rows], keys, values, last, facts))
        return torch.cat(parts)


class HostRunner(ModelRunner):
    """A `ModelRunner` that finishes draws when it launches them."""

    params: SamplingParams

    def __init__(self, twin: ModelTwin, *, verifies_drafts: bool = False, **settings: Any) -> None:
        super().__init__(twin.module, **settings)
        self.twin = twin
        # `KeyRows` take one token of every sample a step, drafts are several of some.
        self._may_keep_rows = not (verifies_drafts or self.deterministic)
        self._weights_version: object = None  # of the weights that `_body` was made with
        self._key_rows = KeyRows(self.paging)
        self._made_lanes: Lanes | None = None
        self._lanes: Lanes | None = None  # where they pay in this call

    @property
    def kept_bytes(self) -> int:
        """Implement `ModelRunner.kept_bytes`."""
        stacks = self._body.num_bytes if isinstance(self._body, StackedDecoder) else 0
        return super().kept_bytes + self._key_rows.num_bytes + stacks

    def allocate(self, num_pages: int) -> None:
        """Implement `ModelRunner.allocate`."""
        self._key_rows.release()
        super().allocate(num_pages)

    def release(self) -> None:
        """Implement `ModelRunner.release`. Copies of weights go as well."""
        self._key_rows.release()
        if isinstance(self._body, StackedDecoder):
            self._body = self._lanes = self._made_lanes = None
        super().release()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Implement `ModelRunner.copy_pages`."""
        sources, targets = np.array(pairs, np.int64).T
        for layer in self.paging.layers.values():
            for cache in map(words, layer.tensors):
                cache[targets] = cache[sources]

    def begin(self, params: SamplingParams, most_tokens: int) -> None:
        """Implement `ModelRunner.begin`."""
        self.params = params
        if self._body is None:
            self._body = self.make_body(StackedDecoder if self._is_small() else TorchDecoder)
        elif isinstance(self._body, StackedDecoder) and self._weights_version != self.twin.version:
            self._body.refresh()
        self._weights_version = self.twin.version

        self._key_rows.clear()
        self._lanes = None
        may_use_lanes = self.parallel is None and self._may_keep_rows
        if may_use_lanes and host_lanes.pay(self._body, most_tokens):
            self._lanes = self._made_lanes = self._made_lanes or Lanes(
                self._body, self.module.get_output_embeddings()
            )

    def steps_at_once(self, scheduler: Scheduler) -> int:
        """Implement `ModelRunner.steps_at_once`."""
        uses_lanes = self._keeps_rows(scheduler) and self._count_lanes(len(scheduler.unfinished))
        return STEPS_AT_ONCE if uses_lanes else 1

    @torch.inference_mode()
    def start(self, scheduler: Scheduler, slots: IntArray, hidden: Tensor) -> Draws:
        """Implement `ModelRunner.start`."""
        keys = self._noise_keys(scheduler, slots)
        if self._lanes is None:
            answer = self._draw(hidden, keys)
        else:
            shares = self._lanes.share(
                len(slots), lambda mine: self._draw(hidden[mine], keys[mine])
            )
            answer = host_lanes.joined(shares)
        return self._draws(scheduler, slots, answer)

    @torch.inference_mode()
    def extend(
        self,
        sequences: IdLists,
        pages: IdLists,
        cached: Sequence[int],
        shifts: Sequence[int],
    ) -> Tensor:
        """Implement `ModelRunner.extend`."""
        extend = super().extend
        longest = max(len(sequence) - start for sequence, start in zip(sequences, cached))
        is_few = len(sequences) < torch.get_num_threads()
        if self._lanes is None or (is_few and longest > LONG_EXTENSION):
            return extend(sequences, pages, cached, shifts)

        def compute(mine: slice) -> Tensor:
            return extend(sequences[mine], pages[mine], cached[mine], shifts[mine])

        return torch.cat(self._lanes.share(len(sequences), compute))

    @torch.inference_mode()
    def decode(self, scheduler: Scheduler, slots: IntArray, steps: int) -> list[Draws]:
        """Implement `ModelRunner.decode`."""
        assert self._body is not None
        keeps_rows = self._keeps_rows(scheduler)
        lanes = 0
        if keeps_rows:
            # Anew: samples may have been pre-empted since `steps_at_once`.
            lanes = self._count_lanes(len(slots))
            slots = self._key_rows.arrange(scheduler, slots, steps, by_column=lanes > 0)
        last = Fed.last(scheduler, slots)
        if lanes:
            return self._decode_in(lanes, scheduler, slots, last.ids, steps)

        if not keeps_rows:
            return [self._feed(scheduler, last)]
        self._key_rows.lay_out()
        draws = self._feed(scheduler, last, rows=self._key_rows)
        self._key_rows.advance(scheduler, steps)(slice(0, len(slots)))
        return [draws]

    @torch.inference_mode()
    def verify(self, scheduler: Scheduler, slots: IntArray, drafts: IdLists) -> list[Draws]:
        """Implement `ModelRunner.verify`: each token is a row of one step."""
        fed = Fed.drafts(scheduler, slots, drafts)
        return right_draws(fed, self._feed(scheduler, fed))

    def _feed(self, scheduler: Scheduler, fed: Fed, rows: KeyRows | None = None) -> Draws:
        """Feed tokens, and draw after each of them. Keys are in `rows`, or in pages."""
        assert self._body is not None
        slots = fed.slots
        step: Step = rows or self._pages_step(scheduler, slots, fed.positions)
        rotary = fed.positions + scheduler.shifts[slots]
        with self.recording() as recorded:
            hidden = self._body(torch.from_numpy(fed.ids), torch.from_numpy(rotary), step)
            routes = recorded()
        answer = self._draw(hidden, row_keys(scheduler.keys[slots], fed.drawn))
        draws = self._draws(scheduler, slots, answer)
        return draws if routes is None else draws._replace(routes=routes.numpy())

    def _decode_in(
        self,
        lanes: int,
        scheduler: Scheduler,
        slots: IntArray,
        ids: IntArray,
        steps: int,
    ) -> list[Draws]:
        assert self._lanes is not None
        arrays = self._key_rows.arrays()
        weights = self._lanes.weights()
        noise_keys = np.stack([self._noise_keys(scheduler, slots, step) for step in range(steps)])
        fill_pages = self._key_rows.advance(scheduler, steps)

        def run(lane: Lane) -> list[Answer]:
            mine = lane.rows
            if self.params.is_filtered or self.head != Head():
                answers = []
                last = ids[mine]
                for step in range(steps):
                    hidden = lane.hidden(last, weights, arrays, arrays.column + step)
                    answers.append(self._draw(hidden, noise_keys[step, mine], lane.logits))
                    last = answers[-1][0]
            else:
                drawn = mine if self.params.temperature else slice(0)
                noise = noise_keys[:, drawn]
                answers = lane.generate(
                    ids[mine], noise, weights, arrays, self.params.temperature or 1.0
                )

            fill_pages(mine)
            return answers

        answers = self._lanes.run(weights, len(slots), lanes, run)
        return [self._draws(scheduler, slots, answer) for answer in answers]

    def _keeps_rows(self, scheduler: Scheduler) -> bool:
        return self._may_keep_rows and most_bytes(scheduler, self.page_bytes) <= ROWS_BYTES

    def _count_lanes(self, rows: int) -> int:
        """Return the number of lanes for so many `KeyRows`; 0: torch's own operations are used."""
        if self._lanes is None:
            return 0
        threads = torch.get_num_threads()
        return host_lanes.count_lanes(rows, threads, self._weight_bytes)

    def _noise_keys(
        self, scheduler: Scheduler, slots: IntArray, ahead: IntArray | int = 0
    ) -> NDArray[np.int32]:
        return row_keys(scheduler.keys[slots], scheduler.drawn[slots] + ahead)

    def _draws(self, scheduler: Scheduler, slots: IntArray, answer: Answer) -> Draws:
        return Draws.done(slots, scheduler.epoch[slots], answer)

    def _is_small(self) -> bool:
        """Return whether copies of the weights are cheap and change no more than the last bits.

        Prompts with pictures are computed by the module, whose keys have another order than those
        of the copies.
        """
        if reads_pictures(self.module.config):
            return False
        is_exact = self.dtype in (torch.float32, torch.float64)
        return self._weight_bytes <= STACKED_BYTES and is_exact and not self.deterministic

    @functools.cached_property
    def _weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.itemsize for parameter in self.module.parameters())

    def _pages_step(self, scheduler: Scheduler, slots: IntArray, positions: IntArray) -> DecodeStep:
        size = self.page_size
        number = positions // size
        table = scheduler.table[slots, : int(number.max()) + 1]
        kind = InvariantDecodeStep if self.deterministic else DecodeStep
        return kind(
            pages=torch.from_numpy(table[np.arange(len(table)), number]),
            offsets=torch.from_numpy(positions % size),
            positions=torch.from_numpy(positions),
            longest=int(positions.max()) + 1,
            chunks=plan_chunks(torch.from_numpy(table), (number + 1).tolist(), size),
            page_size=size,
            paging=self.paging,
        )

    def _draw(
        self, hidden: Tensor, keys: NDArray[np.int32], memory: Tensor | None = None
    ) -> Answer:
        """Draw tokens (b,) and their log-probs (b,) from hidden states (b, H).

        Args:
            hidden: hidden states.
            keys: (b, 2) the keys of the noise.
            memory: (rows, V) place for the logits; None: new memory.
        """
        noise = None if self.params.temperature == 0 else torch.from_numpy(keys)
        vocabulary = self.module.get_output_embeddings().weight.shape[0]  # pyright: ignore
        rows = max(1, ALIVE_LOGITS // vocabulary) if memory is None else len(memory)
        draw = invariant.draw if self.deterministic else sample

        parts = []
        for first in range(0, hidden.shape[0], rows):
            mine = slice(first, first + rows)
            states = hidden[mine]
            out = None if memory is None else memory[: len(states)]
            own_noise = None if noise is None else noise[mine]
            logits = self.logits(states, out)
            parts.append(draw(logits, self.params, own_noise))

        tokens, log_probs = parts[0]
        if len(parts) > 1:
            tokens, log_probs = map(torch.cat, zip(*parts))
        if self.parallel is not None:
            self.parallel.agree(tokens)
        return tokens.numpy(), log_probs.numpy()
