"""Run the engine's module: packed prefill, batched decode, logits, and the draw."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.attention import Layout
from verl.models.families import LLAMA_FAMILIES, LLAMA_VISION_FAMILIES
from verl.models.logprobs import head_logits, head_of
from verl.models.packed import PackedBatch
from verl.models.pictures import Pictures
from verl.models.routing import joined, route_dtype, watch_routers
from verl.models.vision import language_inputs, text_body
from verl.rollout.eight_bits import cached_bytes
from verl.rollout.embedded.attention import LayerPages, LayerShape, Paging, PrefillStep, Step
from verl.rollout.embedded.audit import refuse_variant_operations
from verl.rollout.embedded.extension import extend_step
from verl.rollout.embedded.fused import FusedDecoder, can_fuse
from verl.rollout.embedded.invariant import head_logits as invariant_head_logits
from verl.rollout.embedded.invariant import make_invariant
from verl.rollout.embedded.samples import Answer, IdLists, IntArray, Prefill
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.embedded.tensor_parallel import TensorParallel
from verl.rollout.types import RouteArray, SamplingParams
from verl.utils.devices import send
from verl.utils.logging import logger


class Draws(NamedTuple):
    """One draw for each of `slots`, launched in `epochs`.

    `result` returns the tokens (b,) and their log-probs (b,). It waits while the device computes.
    `routes` (b, C) are the experts of the tokens that were fed, valid after `result`. `is_there`
    returns whether `result` would not wait.
    """

    slots: IntArray
    epochs: IntArray
    result: Callable[[], Answer]
    routes: RouteArray | None = None
    is_there: Callable[[], bool] = lambda: True

    @classmethod
    def done(
        cls,
        slots: IntArray,
        epochs: IntArray,
        answer: Answer,
        routes: RouteArray | None = None,
    ) -> "Draws":
        """Return draws whose tokens and log-probs are known."""
        return cls(slots, epochs, lambda: answer, routes)

    def take(self, rows: IntArray) -> "Draws":
        """Return the draws of `rows`. Waits for them."""
        answer = self.result()
        routes = None if self.routes is None else self.routes[rows]
        return Draws.done(
            self.slots[rows], self.epochs[rows], (answer[0][rows], answer[1][rows]), routes
        )


# Token ids (b,) and positions (b,) of one step -> hidden states (b, H).
Body = Callable[[Tensor, Tensor, Any], Tensor]


class ModelRunner:
    """A model with paged attention, and the pages of its layers.

    Each kind of device has a subclass. All inputs are host memory (lists and numpy arrays). Drawn
    tokens come back as `Draws`, of which `lag` may be on their way while the next step is launched.
    """

    lag = 0
    # of the slots that must be free before more samples are admitted to a running batch
    refill_share = 0.0
    # tokens that `decode_and_extend` takes beyond one for each slot
    spare_rows = 0
    # that the decoder of `make_body` computes
    fused_families: tuple[str, ...] = (*LLAMA_FAMILIES, *LLAMA_VISION_FAMILIES)

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        page_size: int,
        max_model_len: int,
        deterministic: bool,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
        parallel: TensorParallel | None = None,
        records_routes: bool = False,
    ) -> None:
        self.module = module
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.device = device
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype  # of keys and values in pages
        self.deterministic = deterministic
        self.parallel = parallel
        if deterministic:
            make_invariant(module, device)
        if parallel is not None:
            parallel.sum_outputs(module)

        self.paging = Paging(module, invariant=deterministic)
        # choices of experts that each step records (see `verl.models.routing`), and their dtype
        self.num_routes = watch_routers(module, self.paging.packing) if records_routes else 0
        self.route_dtype = route_dtype(module) if records_routes else torch.uint8
        self.head = head_of(module)
        self.num_pages = 0
        self.capture_s = 0.0
        # made at the first `begin`, which comes when the weights are there
        self._body: Body | None = None
        self._shapes: dict[nn.Module, LayerShape] = {}

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page over all layers. Needs the model's weights the first time."""
        head_bytes = 0
        for shape in self.layer_shapes().values():
            numbers = shape.key_dim + shape.value_dim
            head_bytes += shape.heads * cached_bytes(numbers, self.cache_dtype)
        return head_bytes * self.page_size

    @property
    def kept_bytes(self) -> int:
        """Return the bytes kept from step to step: pages, and copies of keys or weights."""
        return self.num_pages * self.page_bytes

    @property
    def other_bytes(self) -> int:
        """Return the bytes that steps will allocate in addition to weights and pages."""
        return 0

    def layer_shapes(self) -> dict[nn.Module, LayerShape]:
        """Return the shape of every layer's cache.

        A prefill of one token shows it, because configurations name head sizes in many ways.
        """
        if not self._shapes:
            audit: AbstractContextManager[None] = nullcontext()
            if self.deterministic:
                audit = refuse_variant_operations(self.module.config.model_type)
            with self.paging.counting() as seen, audit:
                self.prefill([[0]], [[0]])
            self._shapes = dict(seen)
        return self._shapes

    @torch.inference_mode()
    def allocate(self, num_pages: int) -> None:
        """Grow the cache to `num_pages` pages. Existing pages keep their keys and values."""
        for module, shape in self.layer_shapes().items():
            # Zeros: a masked position has weight 0, and 0 times the NaN of fresh memory would be
            # NaN.
            size = (num_pages, shape.heads, self.page_size)
            keys = torch.zeros(*size, shape.key_dim, dtype=self.dtype, device=self.device)
            values = torch.zeros(*size, shape.value_dim, dtype=self.dtype, device=self.device)

            if module in self.paging.layers:
                for new, old in zip((keys, values), self.paging.layers[module].tensors):
                    # The old cache is longer if an interrupt ended an earlier call.
                    new[: self.num_pages] = old[: self.num_pages]
            self.paging.layers[module] = LayerPages(keys, values)
        self.num_pages = num_pages

    def release(self) -> None:
        """Give the cache's memory back."""
        self.paging.release()
        self.num_pages = 0

    def kept_asleep(self) -> dict[str, int]:
        """Return the bytes that stay on the device while the engine sleeps, by purpose."""
        return {}

    @torch.inference_mode()
    def prefill(
        self,
        sequences: IdLists,
        pages: IdLists,
        pictured: Sequence[tuple[int, Pictures]] = (),
    ) -> Tensor:
        """Compute S whole sequences and fill their pages.

        Returns the last hidden state of each, (S, H).

        Args:
            sequences: token ids of each.
            pages: pages of each.
            pictured: of each, how many tokens are its prompt, and the pictures in it.
        """
        cached = [0] * len(sequences)
        ids, positions, new, last = self._pack(sequences, pages, cached)
        if any(pictures for _, pictures in pictured):
            states = self._hidden_with_pictures(sequences, pictured, new)
        else:
            states = self._prefill_hidden(ids, positions, new)
        return states.index_select(0, last)

    def _hidden_with_pictures(
        self,
        sequences: IdLists,
        pictured: Sequence[tuple[int, Pictures]],
        step: PrefillStep,
    ) -> Tensor:
        """Compute hidden states (N, H) of packed sequences, some of them with pictures."""
        prompt_lengths = [length for length, _ in pictured]
        pictures = [own for _, own in pictured]
        batch = PackedBatch.from_sequences(sequences).with_pictures(pictures, prompt_lengths)
        batch = batch.to(self.device)
        layout = replace(step.layout, ahead=batch.ahead)
        with self.paging.computing(replace(step, layout=layout)):
            inputs = language_inputs(self.module, batch.input_ids, batch.placed)
            output = text_body(self.module)(
                **inputs,
                position_ids=batch.position_ids.unsqueeze(-2),
                attention_mask=None,
                use_cache=False,
            )
        return output.last_hidden_state[0]

    @torch.inference_mode()
    def extend(
        self,
        sequences: IdLists,
        pages: IdLists,
        cached: Sequence[int],
        shifts: Sequence[int],
    ) -> Tensor:
        """Compute sequences that have the keys of their first `cached` tokens in pages.

        Returns the same states as `prefill`. Positions are `shifts` off the places of their tokens.
        """
        assert self._body is not None
        ids, positions, new, last = self._pack(sequences, pages, cached)
        positions = positions + self.to_device(np.repeat(shifts, new.layout.lengths))
        step = extend_step(new, cached, pages, self.page_size)
        return self._body(ids, positions, step).index_select(0, last)

    def _pack(
        self,
        sequences: IdLists,
        pages: IdLists,
        cached: Sequence[int],
    ) -> tuple[Tensor, Tensor, PrefillStep, Tensor]:
        """Pack the tokens of sequences after their first `cached` ones.

        Returns ids (N,), positions (N,), where their keys and values go, and the place (S,) of the
        last token of each sequence.
        """
        size = self.page_size
        new_ids = []
        new_positions = []
        owners = []
        for sequence, mine, start in zip(sequences, pages, cached):
            position = np.arange(start, len(sequence))
            new_ids.append(np.asarray(sequence[start:], np.int64))
            new_positions.append(position)
            owners.append(np.asarray(mine, np.int64)[position // size])

        lengths = tuple(len(each) for each in new_ids)
        ends = np.cumsum([0, *lengths])
        positions = np.concatenate(new_positions)
        layout = Layout(lengths, self.to_device(ends.astype(np.int32)))
        step = self._prefill_step(
            layout, self.to_device(np.concatenate(owners)), self.to_device(positions % size)
        )
        ids = self.to_device(np.concatenate(new_ids))
        return ids, self.to_device(positions), step, self.to_device(ends[1:] - 1)

    def begin(self, params: SamplingParams, most_tokens: int) -> None:
        """Use `params` for the following draws, of at most `most_tokens` tokens."""
        raise NotImplementedError

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor | None]]:
        """Record the experts that a step chooses; call the result for them (b, C) if asked for."""
        packing = self.paging.packing
        packing.recorded = {} if self.num_routes else None
        try:
            yield lambda: joined(packing.recorded, self.route_dtype) if packing.recorded else None
        finally:
            packing.recorded = None

    def make_body(self, fused: Callable[..., FusedDecoder]) -> Body:
        """Return the function that computes the layers of a decode step."""
        if can_fuse(self.module, self.fused_families):
            shapes = self.layer_shapes()
            return fused(
                self.module,
                self.paging,
                shapes,
                max_positions=self.max_model_len,
                parallel=self.parallel,
            )
        logger.info(
            f"rollout: '{self.module.config.model_type}' decodes through its module's own layers"
        )
        return self.hidden

    def start(self, scheduler: Scheduler, slots: IntArray, hidden: Tensor) -> Draws:
        """Draw the first tokens of `slots` (b,) from hidden states (b, H).

        They are also the first tokens after a pre-emption.
        """
        raise NotImplementedError

    def steps_at_once(self, scheduler: Scheduler) -> int:
        """Return the most steps of one call of `decode`.

        A sample that ends in one of them is still computed in the others.
        """
        return 1

    def decode(self, scheduler: Scheduler, slots: IntArray, steps: int) -> list[Draws]:
        """Feed the last token of each of `slots` (b,) and draw the next one, `steps` times.

        The slots have the pages for these tokens already.
        """
        raise NotImplementedError

    def decode_and_extend(
        self, scheduler: Scheduler, slots: IntArray, prefills: Mapping[int, Prefill]
    ) -> Draws:
        """Decode one step, and compute the ends of `prefills` in it.

        Args:
            scheduler: of all samples.
            slots: (b,) that draw. They have the pages for these tokens already.
            prefills: by those of `slots` that start. Together they have at most `spare_rows` more
                tokens that are not cached than one each.
        """
        raise NotImplementedError

    def verify(self, scheduler: Scheduler, slots: IntArray, drafts: IdLists) -> list[Draws]:
        """Feed the last token of each of `slots` (b,) and its draft, and draw after each of them.

        Returns the right draws: for every slot the next one, then those after right drafts. The
        slots have the pages for all these tokens already.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy page a to page b for each pair (a, b); all are read before any is written."""
        source, target = (self.to_device(np.array(pages, np.int64)) for pages in zip(*pairs))
        for layer in self.paging.layers.values():
            for cache in layer.tensors:
                cache.index_copy_(0, target, cache.index_select(0, source))

    def hidden(self, ids: Tensor, positions: Tensor, step: PrefillStep | Step) -> Tensor:
        """Compute hidden states (N, H) of ids (N,) at positions (N,) by the module's own layers."""
        with self.paging.computing(step):
            output = text_body(self.module)(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=None,
                use_cache=False,
            )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits (b, V) of states (b, H), fp32 or float64; see `head_logits`."""
        linear: Any = self.module.get_output_embeddings()
        if self.deterministic:
            return invariant_head_logits(hidden, linear.weight, linear.bias, self.head)
        return head_logits(hidden, linear.weight, linear.bias, self.head, out=out)

    def _prefill_hidden(self, ids: Tensor, positions: Tensor, step: PrefillStep) -> Tensor:
        if not (isinstance(self._body, FusedDecoder) and self._body.prefills):
            return self.hidden(ids, positions, step)
        with self.paging.computing(step):
            return self._body(ids, positions, step)

    def _prefill_step(self, layout: Layout, pages: Tensor, offsets: Tensor) -> PrefillStep:
        return PrefillStep(layout, pages, offsets)

    def to_device(self, array: NDArray) -> Tensor:
        """Copy `array` to new memory on the device."""
        return send(torch.from_numpy(array), self.device)
