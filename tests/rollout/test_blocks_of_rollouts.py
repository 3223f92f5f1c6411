"""Whole rollouts by the runner of CUDA, on a device that only remembers the tokens in its pages.

A row attends by reading tokens: those that its block shares from the pages of the block's first
row, the others from its own. Its draw depends on all of them, so a wrong page changes a completion.
"""

import contextlib
import functools
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import cases
from tests.rollout.engines import make_engine, talkative_model
from verl.config.rollout import SpeculativeConfig
from verl.models.attention import Facts
from verl.rollout import Completion, Continuation, Request, SamplingParams
from verl.rollout.embedded import engine as engine_module
from verl.rollout.embedded.attention import LayerShape
from verl.rollout.embedded.runner import Draws, ModelRunner
from verl.rollout.embedded.samples import IdLists, IntArray
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.sampling import sample_keys

pytest.importorskip("triton", reason="comes with the CUDA builds of torch")
from verl.rollout.embedded import cuda_runner
from verl.rollout.embedded.cuda_runner import CudaRunner, StepKind, ladder
from verl.rollout.embedded.device_slots import DeviceSlots

PAGE_SIZE = 4
LONGEST = 80  # tokens of a sequence
STOP = 11
SEED = 3
PARAMS = SamplingParams(max_new_tokens=14, ignore_eos=True, stop_token_ids=(STOP,))


def digest(token_ids: Any) -> int:
    return zlib.crc32(np.array(token_ids, np.int64).tobytes())


def drawn_token(state: int, key: int, position: int) -> int:
    """Return the token that a sample draws at a response position, after the text of `state`."""
    return 5 + digest([state, key % 2**62, position]) % 30


class RememberingRunner(CudaRunner):
    """Runs steps on tables and slots that lie on the host. A hidden state is a digest of a text."""

    def __init__(self, twin: Any, *, verifies_drafts: bool, **settings: Any) -> None:
        ModelRunner.__init__(self, twin.module, **settings)
        self.twin = twin
        self.enforce_eager = False
        self._body: Any = True  # there is nothing to compute
        self._num_sms = 0  # so any saved token pays
        self._settings = torch.zeros(4)

    def prepare(self, max_num_seqs: int, spare_rows: int, lag: int) -> None:
        """Make the slots, whose number the engine gives to runners of CUDA alone."""
        most_rows = max_num_seqs + spare_rows
        self.spare_rows = spare_rows
        self.lag = lag
        self.sizes = sorted({*ladder(max_num_seqs), *ladder(most_rows)})
        self.slots = DeviceSlots(
            max_num_seqs,
            spare_rows,
            width=LONGEST // PAGE_SIZE,
            page_size=PAGE_SIZE,
            device=self.device,
            shifts=False,
        )
        self._draw: Any = SimpleNamespace(
            tokens=np.zeros(most_rows, np.int64), log_probs=np.zeros(most_rows, np.float32)
        )
        self.captured = set[StepKind]()
        self.inherited = 0  # rows that read shared tokens from another row's pages
        self.steps_until_interrupt = -1  # negative: none comes

    @property
    def page_bytes(self) -> int:
        return 1

    def layer_shapes(self) -> dict[torch.nn.Module, LayerShape]:
        return {self.module: LayerShape(1, 1, 1, Facts(1.0, None, None, None))}

    def allocate(self, num_pages: int) -> None:
        # tokens, and the version of the weights that computed their keys
        self.contents = np.full((2, num_pages + 1, PAGE_SIZE), -1)
        self.slots.set_padding(num_pages)
        self.num_pages = num_pages
        self.versions: list[object] = []

    def release(self) -> None:
        self.num_pages = 0

    def kept_asleep(self) -> dict[str, int]:
        return {}

    def begin(self, params: SamplingParams, most_tokens: int) -> None:
        if self.twin.version not in self.versions:
            self.versions.append(self.twin.version)
        super().begin(params, most_tokens)

    def prefill(self, sequences: IdLists, pages: IdLists, pictured: Any = ()) -> Tensor:
        starts = [0] * len(sequences)
        return self.extend(sequences, pages, starts, starts)

    def extend(
        self, sequences: IdLists, pages: IdLists, cached: Sequence[int], shifts: Sequence[int]
    ) -> Tensor:
        states = []
        for sequence, own, start in zip(sequences, pages, cached):
            for place in range(start, len(sequence)):
                self._write(own[place // PAGE_SIZE], place % PAGE_SIZE, sequence[place])
            text = self._read(own, len(sequence))[0]
            assert text.tolist() == list(sequence), "cached pages hold other tokens"
            states.append(digest(text))
        return torch.tensor(states)[:, None]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = np.array(pairs).T
        self.contents[:, targets] = self.contents[:, sources]

    def _write(self, page: int, offset: int, token: int) -> None:
        self.contents[:, page, offset] = token, len(self.versions)

    def _read(self, pages: Any, count: int) -> np.ndarray:
        """Return the first `count` tokens of pages, and the versions of their keys."""
        places = np.arange(count)
        return self.contents[:, np.asarray(pages)[places // PAGE_SIZE], places % PAGE_SIZE]

    def _graph(self, kind: StepKind) -> Any:
        """Return a step with a `replay`. The first of a kind is taken with padding, as captures are."""
        if kind not in self.captured:
            self.captured.add(kind)
            before = self.contents[:, :-1].copy()
            with self.slots.only_padding():
                self._step(kind)
            assert np.array_equal(self.contents[:, :-1], before), "a capture changed a sample"
        return SimpleNamespace(replay=functools.partial(self._step, kind))

    def _step(self, kind: StepKind) -> None:
        self.steps_until_interrupt -= 1
        if self.steps_until_interrupt == 0:
            raise KeyboardInterrupt

        state = self.slots.state
        slots = self.slots.rows[: kind.rows].tolist()
        for slot in slots:
            place = int(state.positions[slot])
            page = int(state.table[slot, place // PAGE_SIZE])
            self._write(page, place % PAGE_SIZE, int(state.tokens[slot]))

        first_rows = self._first_rows(kind) if kind.shares else {}
        states = []
        for row, slot in enumerate(slots):
            count = int(state.positions[slot]) + 1
            own = self._read(state.table[slot], count)
            first, tokens = first_rows.get(row, (row, 0))
            assert tokens < count, "a block has tokens behind its row"
            if tokens:
                assert slot != self.slots.most_rows, "a padding row is in a block"
                self.inherited += first != row

            shared = self._read(state.table[slots[first]], tokens)
            assert np.array_equal(shared, own[:, :tokens]), "the first row has other keys"
            states.append(digest([*shared[0], *own[0, tokens:]]))

        self._draw_rows(torch.tensor(states)[:, None], kind.rows, moves=1)

    def _first_rows(self, kind: StepKind) -> dict[int, tuple[int, int]]:
        """Return the first row and the tokens of the block of each row that is in one."""
        prefixes = self.slots.prefixes.of(kind.rows)
        found: dict[int, tuple[int, int]] = {}
        covered = [0] * kind.rows
        for block in torch.stack(prefixes[:3], dim=1).tolist():
            first, count, tokens = block
            for row in range(first, first + count):
                assert row not in found, "a row is in two blocks"
                found[row] = first, tokens
                covered[row] = tokens

        assert prefixes.covered.tolist() == covered
        return found

    def _draw_rows(self, hidden: Tensor, rows: int, *, moves: int) -> None:
        state = self.slots.state
        for row, slot in enumerate(self.slots.rows[:rows].tolist()):
            token = drawn_token(int(hidden[row]), int(state.keys[slot]), int(state.drawn[slot]))
            self._draw.tokens[row] = token
            if slot != self.slots.most_rows:
                state.tokens[slot] = token
                state.positions[slot] += moves
                state.drawn[slot] += 1

    def _fetch(self, scheduler: Scheduler, slots: IntArray, *, has_routes: bool = False) -> Draws:
        count = len(slots)
        answer = self._draw.tokens[:count].copy(), self._draw.log_probs[:count].copy()
        return Draws.done(slots, scheduler.epoch[slots].copy(), answer)


class Rollouts:
    """Random requests, and the tokens that each of their samples must draw."""

    def __init__(self, engine: Any, random: np.random.Generator) -> None:
        self.engine = engine
        self.random = random
        self.prompts: dict[int, tuple[int, ...]] = {}  # by sample
        self.limits: dict[int, int] = {}
        self.answers: dict[int, list[int]] = {}
        self.stems = [self.some_tokens(random.integers(1, 30)) for _ in range(3)]

    def some_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.integers(5, 35, count).tolist())

    def submit(self, prompt: tuple[int, ...], samples: int) -> None:
        ids = tuple(range(len(self.prompts), len(self.prompts) + samples))
        limits = tuple(self.random.integers(1, 15, samples).tolist())
        self.prompts.update(dict.fromkeys(ids, prompt))
        self.limits.update(zip(ids, limits))
        self.send(Request(prompt_ids=prompt, sample_ids=ids, limits=limits))

    def send(self, request: Request) -> None:
        self.engine.submit([request], PARAMS, seed=SEED, step=0)

    def submit_some(self) -> None:
        for _ in range(self.random.integers(1, 4)):
            stem = self.stems[self.random.integers(3)]
            end = self.some_tokens(self.random.integers(5))
            self.submit((*stem, *end), self.random.integers(1, 20))

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            for completion in self.engine.step():
                self.check(completion)
                # now and then another turn, in which the pages of this one are found
                turn = (*self.prompts[completion.sample_id], *completion.token_ids, 7, 9)
                if len(turn) < LONGEST - 20 and self.random.random() < 0.2:
                    self.submit(turn, self.random.integers(1, 3))

    def freeze(self) -> None:
        """Take all samples out, and let them go on, often with other weights."""
        aborted = self.engine.freeze()
        while self.engine.has_work:
            self.take_steps(1)
        if self.random.random() < 0.7:
            self.engine.update_weights(self.engine.twin.module.named_parameters())
        if self.random.random() < 0.5:
            self.submit_some()

        for each in aborted:
            begun = Continuation(
                step=0,
                number=each.sample_id,
                token_ids=tuple(each.token_ids),
                log_probs=tuple(each.log_probs),
            )
            request = Request(
                prompt_ids=self.prompts[each.sample_id],
                sample_ids=(each.sample_id,),
                limits=(self.limits[each.sample_id],),
                continuations=(begun,),
            )
            self.send(request)

    def interrupt(self) -> None:
        """Interrupt a step, or the capture of one, and sleep now and then."""
        runner = self.engine.runner
        runner.steps_until_interrupt = self.random.integers(1, 4)
        with contextlib.suppress(KeyboardInterrupt):
            while self.engine.has_work:
                self.take_steps(1)
        runner.steps_until_interrupt = -1

        if not self.engine.has_work and self.random.random() < 0.5:
            self.engine.sleep()
            self.engine.wake()
        lost = self.prompts.keys() - self.answers.keys()
        self.answers.update((sample, []) for sample in lost)

    def check(self, completion: Completion) -> None:
        """Check a sample against draws from its own text alone."""
        sample = completion.sample_id
        key = int(sample_keys(SEED, np.array([0]), np.array([sample])).view(np.int64)[0])
        text = list(self.prompts[sample])
        drawn: list[int] = []
        while len(drawn) < self.limits[sample] and STOP not in drawn:
            drawn.append(drawn_token(digest([*text, *drawn]), key, len(drawn)))
        assert completion.token_ids == drawn
        assert sample not in self.answers
        self.answers[sample] = drawn


@pytest.mark.parametrize("seed", cases(range(48), quick=lambda seed: seed < 6))
def test_rows_of_a_block_have_the_keys_that_its_first_row_reads(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    random = np.random.default_rng(seed)
    monkeypatch.setattr(engine_module, "HostRunner", RememberingRunner)
    monkeypatch.setattr(cuda_runner, "can_share", lambda *sizes: True)  # there are no kernels
    slots = int(random.integers(12, 40))
    caches = seed % 2 == 1
    has_drafts = seed % 3 == 2
    engine = make_engine(
        talkative_model("qwen2"),
        num_pages=int(random.integers(30, 160)),
        page_size=PAGE_SIZE,
        max_model_len=LONGEST,
        max_num_seqs=slots,
        max_num_batched_tokens=int(random.integers(40, 400)),
        enable_prefix_caching=caches,
        speculative=SpeculativeConfig(method="ngram" if has_drafts else None),
    )
    runner = engine.runner
    runner.prepare(slots, spare_rows=24, lag=int(random.integers(1, 3)))

    rollouts = Rollouts(engine, random)
    for _ in range(20):
        rollouts.submit_some()
        rollouts.take_steps(int(random.integers(1, 12)))
        chance = random.random()
        if chance < 0.3:
            rollouts.freeze()
        elif chance < 0.45:
            rollouts.interrupt()
        elif chance < 0.6:
            while engine.has_work:
                rollouts.take_steps(1)
        engine.check_integrity()
    while engine.has_work:
        rollouts.take_steps(1)

    assert rollouts.answers.keys() == rollouts.prompts.keys()
    assert runner.inherited > 40
    if caches:
        assert any(kind.several for kind in runner.captured)
