"""The runner of a CUDA device: decode steps are graphs, and the host is always a step behind.

The inputs of a step are at fixed addresses in every replay: the weights, the pages, and for each
slot its last token, position, page table and sampling key. A step draws its tokens and stores them
for the next step, so that steps follow each other without the host.
"""

import atexit
import bisect
import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.attention import Layout
from verl.models.compiled import compile_towers
from verl.models.experts import FUSED_EXPERT_FAMILIES
from verl.models.families import LLAMA_FAMILIES, LLAMA_VISION_FAMILIES
from verl.models.vision import reads_pictures
from verl.rollout.eight_bits import FP8
from verl.rollout.embedded.arrivals import DrawnRows, arriving
from verl.rollout.embedded.attention import LayerPages, PrefillStep
from verl.rollout.embedded.cuda_decoder import DevicePrefillStep, DeviceStep, TritonDecoder
from verl.rollout.embedded.device_slots import DeviceSlots
from verl.rollout.embedded.fused import GEMMA_FAMILIES, can_fuse
from verl.rollout.embedded.graph_capture import captured
from verl.rollout.embedded.kernels.decode_launch import (
    choose_num_splits,
    fixed_num_splits,
    split_workspace,
)
from verl.rollout.embedded.kernels.sampling import DrawState, Workspace, draw
from verl.rollout.embedded.kernels.shared_prefix import can_share
from verl.rollout.embedded.kernels.slots import advance
from verl.rollout.embedded.prefix_blocks import neighbors
from verl.rollout.embedded.quantization import check_cache_runner, check_runner
from verl.rollout.embedded.runner import Draws, ModelRunner
from verl.rollout.embedded.samples import Answer, IdLists, IntArray, Prefill
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.embedded.several import Fed, right_draws
from verl.rollout.twin import ModelTwin
from verl.rollout.types import SamplingParams
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.logging import logger
from verl.utils.reserved_memory import ReservedMemory
from verl.utils.units import GIB

# Batch sizes with a graph of their own, up to the largest that is ever needed. Rows in between are
# filled up.
_SMALL = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
# Tokens of one part of a row's keys where the parts must not depend on the batch.
FIXED_SPLIT = 256
# With up to this many attention programs a multiprocessor, all run at once, and it costs less to
# handle the fresh token in each program than in a separate kernel. With more programs the separate
# kernel is comparatively small, and the programs are faster without this work.
FRESH_PROGRAMS = 4
# Pages that rows share are read once for several of them, if that saves each multiprocessor so
# many tokens of a key head. The results of shared tokens must be stored and read again: at 0.5B,
# 405 rows that saved 204 tokens each took 30 us with it and 30 without, 576 rows 28 and 31.
SAVED_TOKENS = 1200
# A prefill of few tokens costs almost as much as one of many, so a slot or two that are free do not
# interrupt a running batch.
REFILL_SHARE = 1 / 16
_NONE = np.empty(0, np.int64)


def ladder(most: int) -> list[int]:
    """Return the batch sizes to capture, rising. Large batches pay for every padded row."""
    sizes = [size for size in _SMALL if size < most]
    size = _SMALL[-1]
    while (size := size + (32 if size < 512 else max(64, size // 16))) < most:
        sizes.append(size)
    return [*sizes, most]


class StepKind(NamedTuple):
    """What decides about the kernels of a step, apart from how its tokens are drawn."""

    rows: int
    several: bool  # rows may be tokens of one sample, which see one another
    shares: bool  # pages that rows share are read once for several of them


def _runs_experts_one_by_one(module: PreTrainedModel) -> bool:
    """Check for the experts of transformers that the host starts, one after the other."""
    if getattr(module.config, "_experts_implementation", None) != "eager":
        return False
    return any(name.endswith("experts") for name, _ in module.named_modules())


class CudaRunner(ModelRunner):
    """A `ModelRunner` of a CUDA device.

    Pages and weights keep their addresses over `release` and `allocate`, so each graph is captured
    once, at the first step of its batch size.
    """

    refill_share = REFILL_SHARE

    def __init__(
        self,
        twin: ModelTwin,
        *,
        max_num_seqs: int,
        spare_rows: int,
        lag: int,
        enforce_eager: bool,
        **base: Any,
    ) -> None:
        if twin.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(
                "On CUDA the engine computes in bfloat16, float16 or float32, got "
                f"actor_rollout_ref.rollout.dtype={str(twin.dtype).removeprefix('torch.')}."
            )
        super().__init__(twin.module, **base)
        self.fused_families = (*LLAMA_FAMILIES, *LLAMA_VISION_FAMILIES, *GEMMA_FAMILIES)
        if not self.deterministic and self.parallel is None:
            # Tiles of experts depend on the number of rows, and a rank has a part of each expert.
            self.fused_families += FUSED_EXPERT_FAMILIES
        if self.page_size < 8 or self.page_size & (self.page_size - 1):
            raise ConfigError(
                "On CUDA actor_rollout_ref.rollout.page_size must be a power of two of at least 8, "
                f"got {self.page_size}. 16 is the default."
            )

        self.twin = twin
        self._check_eight_bits()
        one_by_one = _runs_experts_one_by_one(self.module)
        one_by_one = one_by_one and not can_fuse(self.module, self.fused_families)
        if one_by_one and not enforce_eager:
            logger.info(
                "rollout: experts computed one by one wait for the host; decode steps are not CUDA "
                "graphs"
            )
        self.enforce_eager = enforce_eager or one_by_one
        if not enforce_eager:
            compile_towers(self.module)

        self.spare_rows = spare_rows
        self.lag = lag
        most_rows = max_num_seqs + spare_rows
        # Steps of all samples, with nothing else, are the most common large ones.
        self.sizes = sorted({*ladder(max_num_seqs), *ladder(most_rows)})
        self.slots = DeviceSlots(
            max_num_seqs,
            spare_rows,
            width=ceil_div(self.max_model_len, self.page_size),
            page_size=self.page_size,
            device=self.device,
            shifts=reads_pictures(self.module.config),
        )
        self._memory: ReservedMemory | None = None
        self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

        self._settings = torch.zeros(4, device=self.device)
        self._filtered = self._greedy = False
        self._drawn = DrawnRows(most_rows, self.device)
        self._draw = DrawState(
            slots=self.slots.rows,
            keys=self.slots.state.keys,
            drawn=self.slots.state.drawn,
            settings=self._settings,
            tokens=self._drawn.tokens,
            log_probs=self._drawn.log_probs,
        )
        self._routes = torch.zeros(
            most_rows, self.num_routes, dtype=self.route_dtype, device=self.device
        )
        vocabulary: int = self.module.get_output_embeddings().weight.shape[0]  # pyright: ignore
        self._workspace = Workspace(most_rows, vocabulary, self.device)

        self._graphs: dict[tuple[StepKind, bool, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # a single one, because cuBLAS keeps a workspace for every stream
        self._capture_stream = torch.cuda.Stream(self.device)
        if self.parallel is not None:
            # A communicator waits for the graphs that it was captured in, so they go before process
            # groups are closed.
            atexit.register(self._graphs.clear)

    def _check_eight_bits(self) -> None:
        """Refuse eight bits of weights, keys or values that this GPU or model cannot have."""
        if self.twin.quantization is not None:
            family = self.module.config.model_type
            fuses = can_fuse(self.module, self.fused_families)
            check_runner(self.twin.quantization, self.device, family, fuses=fuses)
        if self.cache_dtype == FP8:
            check_cache_runner(self.device)

    @property
    def other_bytes(self) -> int:
        """Return the bytes of fp32 logits: first draw, step outside of a graph, pool of graphs."""
        return 3 * self._workspace.max_rows * self._workspace.vocabulary * 4

    @torch.inference_mode()
    def allocate(self, num_pages: int) -> None:
        """Implement `ModelRunner.allocate`. Adds a page for the writes of rows that pad a batch."""
        page = self.page_bytes
        total = torch.cuda.get_device_properties(self.device).total_memory
        if (num_pages + 1) * page > total:
            raise RolloutError(
                f"{num_pages} pages take {num_pages * page / GIB:.1f} GiB, {self.device} has "
                f"{total / GIB:.1f} GiB. Lower actor_rollout_ref.rollout.num_pages, or leave it "
                "unset."
            )

        if self._memory is None:
            self._memory = ReservedMemory(total, self.device)
        self._memory.grow((num_pages + 1) * page)
        offset = 0

        for module, shape in self.layer_shapes().items():
            views = []
            for size, dtype in shape.page_parts(self.page_size, self.cache_dtype):
                inner = torch.empty(size, device="meta").stride()
                strides = (page // dtype.itemsize, *inner)
                views.append(self._memory.tensor(offset, (num_pages + 1, *size), dtype, strides))
                offset += math.prod(size) * dtype.itemsize
            self.paging.layers[module] = LayerPages(*views)

        self.slots.set_padding(num_pages)
        self.num_pages = num_pages

    def release(self) -> None:
        """Implement `ModelRunner.release`. The addresses stay, and with them the graphs."""
        self.num_pages = 0
        if self._memory is not None:
            self._memory.release()

    def kept_asleep(self) -> dict[str, int]:
        """Implement `ModelRunner.kept_asleep`.

        Does not count kernels and workspaces of libraries, which the trainer uses as well.
        """
        pool_bytes = 0
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(self._pool):
                pool_bytes += segment["total_size"]

        tables = []
        if isinstance(self._body, TritonDecoder):
            tables = [table for pair in self._body.tables.values() for table in pair]
        return {
            "graphs": pool_bytes,
            "scratch of the draw": self._workspace.num_bytes,
            "tables of slots": (self.slots.num_bytes + self._drawn.num_bytes + self._routes.nbytes),
            "rotary tables": sum(tensor.nbytes for tensor in tables),
        }

    @torch.inference_mode()
    def begin(self, params: SamplingParams, most_tokens: int) -> None:
        """Implement `ModelRunner.begin`."""
        values = [params.temperature, params.top_p, params.min_p, float(max(params.top_k, 0))]
        self._settings.copy_(torch.tensor(values))
        self.slots.forget()
        self._greedy = params.temperature == 0
        self._filtered = not self._greedy and params.is_filtered
        if self._body is None:
            self._body = self.make_body(functools.partial(TritonDecoder, self.twin))

    @torch.inference_mode()
    def start(self, scheduler: Scheduler, slots: IntArray, hidden: Tensor) -> Draws:
        """Implement `ModelRunner.start`."""
        self.slots.show(scheduler, slots)
        no_tokens = np.zeros_like(slots)  # the draw gives them
        first = Fed(slots, no_tokens, scheduler.cached[slots], scheduler.drawn[slots])
        self.slots.place(scheduler, first)
        self._draw_rows(hidden, len(slots), moves=0)
        return self._fetch(scheduler, slots)

    @torch.inference_mode()
    def decode(self, scheduler: Scheduler, slots: IntArray, steps: int) -> list[Draws]:
        """Implement `ModelRunner.decode`."""
        slots = neighbors(scheduler, slots)
        self._take_step(scheduler, slots)
        return [self._fetch(scheduler, slots, has_routes=self.num_routes > 0)]

    @torch.inference_mode()
    def decode_and_extend(
        self, scheduler: Scheduler, slots: IntArray, prefills: Mapping[int, Prefill]
    ) -> Draws:
        """Implement `ModelRunner.decode_and_extend`: each token is a row of one step."""
        slots = neighbors(scheduler, slots)
        fed = Fed.prefills(scheduler, prefills)
        # A sample draws from its own slot, so the last token goes there.
        before = fed.slots[~fed.is_last]
        targets = fed.slots.copy()
        targets[~fed.is_last] = self.slots.spare(len(before))
        self.slots.place(scheduler, fed, targets)
        self._take_step(scheduler, slots, before)
        return self._fetch(scheduler, slots)

    @torch.inference_mode()
    def verify(self, scheduler: Scheduler, slots: IntArray, drafts: IdLists) -> list[Draws]:
        """Implement `ModelRunner.verify`. Waits for the device."""
        fed = Fed.drafts(scheduler, slots, drafts)
        first = fed.is_first
        drafted = fed.take(~first)
        self.slots.place(scheduler, drafted, self.slots.spare(len(drafted.slots)))
        self._take_step(scheduler, slots, drafted.slots)

        # The rows of a sample come apart on the device: its own slot, then the spare ones.
        rows = np.concatenate([np.flatnonzero(first), np.flatnonzero(~first)])
        draws = self._fetch(scheduler, fed.slots[rows], has_routes=self.num_routes > 0)
        steps = right_draws(fed, draws.take(np.argsort(rows)))
        self._go_on(scheduler, steps)
        return steps

    def _go_on(self, scheduler: Scheduler, steps: Sequence[Draws]) -> None:
        """Let the slots go on after the last of their right draws."""
        for number, draws in enumerate(steps[1:], 2):
            slots = draws.slots
            place = Fed(
                slots,
                draws.result()[0],
                scheduler.cached[slots] + number,
                scheduler.drawn[slots] + number,
            )
            self.slots.place(scheduler, place)

    def _take_step(self, scheduler: Scheduler, slots: IntArray, spare_of: IntArray = _NONE) -> None:
        """Feed `slots`, and for each of `spare_of` a spare slot, which has the pages of that one."""
        rows = self.sizes[bisect.bisect_left(self.sizes, len(slots) + len(spare_of))]
        several = spare_of.size > 0
        may_share = not several and self._may_share(rows)
        self.slots.show(scheduler, slots, spare_of, blocks=may_share)
        kind = StepKind(rows, several, shares=may_share and self._saves_enough(rows))
        if self.enforce_eager:
            self._step(kind)
        else:
            self._graph(kind).replay()

    def _may_share(self, rows: int) -> bool:
        """Return whether pages that rows share can be read once for several of them.

        The output of a row then depends on the others, to the last bits.
        """
        if self.deterministic or self._is_small(rows):
            return False
        most_heads = max(shape.heads for shape in self.layer_shapes().values())
        group = self._query_heads // most_heads
        return can_share(group, self._widest, self.twin.dtype, self.device)

    def _saves_enough(self, rows: int) -> bool:
        """Return whether it pays to read pages that `rows` rows share once."""
        saved = self.slots.saved_tokens * rows * self._fewest_heads
        return saved >= SAVED_TOKENS * self._num_sms

    def _is_small(self, rows: int) -> bool:
        """Return whether the programs of attention, of one split each, all run at once."""
        return rows * self._fewest_heads <= FRESH_PROGRAMS * self._num_sms

    @functools.cached_property
    def _query_heads(self) -> int:
        heads: int = self.module.config.get_text_config().num_attention_heads
        return heads // (1 if self.parallel is None else self.parallel.axis.size)

    @functools.cached_property
    def _fewest_heads(self) -> int:
        return min(shape.heads for shape in self.layer_shapes().values())

    @functools.cached_property
    def _widest(self) -> int:
        shapes = self.layer_shapes().values()
        return max(max(shape.key_dim, shape.value_dim) for shape in shapes)

    def _prefill_step(self, layout: Layout, pages: Tensor, offsets: Tensor) -> PrefillStep:
        return DevicePrefillStep(layout, pages, offsets)

    def _step(self, kind: StepKind) -> None:
        """Feed the first rows, draw their next tokens and store them."""
        assert self._body is not None
        rows = kind.rows
        ids, positions, pages, offsets = self.slots.feed(rows)
        with self.recording() as recorded:
            step = self._device_step(kind, pages, offsets)
            hidden = self._body(ids, positions, step)
            routes = recorded()
            if routes is not None:
                self._routes[:rows].copy_(routes)
        self._draw_rows(hidden, rows, moves=1)

    def _draw_rows(self, hidden: Tensor, rows: int, *, moves: int) -> None:
        """Draw the next tokens of the first `rows` rows, and advance their slots by `moves`."""
        state = self.slots.state
        drawn = replace(
            self._draw,
            slots=self.slots.rows[:rows],
            tokens=self._draw.tokens[:rows],
            log_probs=self._draw.log_probs[:rows],
        )
        draw(
            self.logits(hidden),
            drawn,
            self._workspace,
            filtered=self._filtered,
            greedy=self._greedy,
        )
        if self.parallel is not None:
            self.parallel.agree(drawn.tokens)

        advance(drawn.slots, drawn.tokens, state.tokens, state.positions, state.drawn, by=moves)

    def _device_step(self, kind: StepKind, pages: Tensor, offsets: Tensor) -> DeviceStep:
        """Return a step of b rows that write to `pages` (b,) at `offsets` (b,).

        Its memory for partial results is large enough for the layer with the most heads.
        """
        rows = kind.rows
        widest = self._widest
        split_tokens = FIXED_SPLIT if self.deterministic else None
        if split_tokens is None:
            num_splits = choose_num_splits(
                rows,
                self._fewest_heads,
                self._num_sms,
                widest=widest,
                eight_bits=self.cache_dtype.itemsize == 1,
            )
        else:
            width = self.slots.state.table.shape[1]
            num_splits = fixed_num_splits(width, self.page_size, split_tokens)

        workspace = None
        if num_splits > 1:
            workspace = split_workspace(rows, self._query_heads, widest, num_splits, self.device)

        # The attention kernel rotates a fresh token by its place, and no other row may see it.
        is_supported = not self.slots.has_shifts and not kind.several
        return DeviceStep(
            slots=self.slots.rows[:rows],
            state=self.slots.state,
            pages=pages,
            offsets=offsets,
            num_splits=num_splits,
            split_tokens=split_tokens,
            workspace=workspace,
            takes_fresh=split_tokens is None and self._is_small(rows) and is_supported,
            prefixes=self.slots.prefixes.of(rows) if kind.shares else None,
        )

    def _graph(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        key = (kind, self._filtered, self._greedy)
        if key not in self._graphs:
            start = time.perf_counter()
            self._graphs[key] = self._capture(kind)
            self.capture_s += time.perf_counter() - start
        return self._graphs[key]

    def _capture(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        """Capture a step.

        Raises RolloutError if a decode step of the model cannot be a graph.
        """
        stream = self._capture_stream
        step = functools.partial(self._step, kind)
        # NCCL's watchdog thread queries events during the capture.
        errors_of = "global" if self.parallel is None else "thread_local"
        with self.slots.only_padding():
            stream.wait_stream(torch.cuda.current_stream(self.device))
            # Kernels are compiled at their first call, so that call must not be captured.
            with torch.cuda.stream(stream):
                step()
                torch.cuda.synchronize(self.device)
            try:
                graph = captured(step, stream, self._pool, errors_of=errors_of)
            except BaseException as error:
                self._pool = torch.cuda.graph_pool_handle()
                is_full = isinstance(error, torch.OutOfMemoryError)
                if is_full or not isinstance(error, RuntimeError):
                    raise
                raise RolloutError(
                    f"A decode step of '{self.module.config.model_type}' cannot be a CUDA graph: "
                    f"{error}. Set actor_rollout_ref.rollout.enforce_eager=true."
                ) from error
            torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def _fetch(self, scheduler: Scheduler, slots: IntArray, *, has_routes: bool = False) -> Draws:
        """Start the copy of the drawn tokens, and of the experts of those fed, to the host."""
        count = len(slots)
        answer = self._drawn.fetch(count)
        routes = arriving(self._routes[:count]).numpy() if has_routes else None
        arrived = torch.cuda.Event()
        arrived.record()

        def result() -> Answer:
            arrived.synchronize()
            return answer()

        return Draws(slots, scheduler.epoch[slots], result, routes, arrived.query)
