"""Answer requests with an engine of their own: each may ask for other sampling parameters."""

import asyncio
import hashlib
import itertools
import secrets
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

from verl.agents.formats.base import ToolSchemas
from verl.agents.gateway.backend import Listen
from verl.agents.gateway.errors import ApiError, unknown_model
from verl.agents.gateway.recorder import same_key, wrong_key
from verl.agents.gateway.requests import ChatRequest, CompletionRequest, DrawSettings
from verl.agents.gateway.sessions import room_for_reply
from verl.agents.gateway.wording import Reply, Wording
from verl.agents.tools.threads import gather_all
from verl.rollout.base import RolloutEngine
from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.errors import VerlError
from verl.utils.logging import logger

# Rounds of the event loop between two steps of the engine: enough for a request to come from its
# socket to the engine, so that requests that come together are prefilled together.
_ROUNDS = 4

# News of running samples: `progress({sample id: tokens known})` returns the tokens and log-probs
# drawn after these.
Progress = Callable[[Mapping[int, int]], dict[int, tuple[list[int], list[float]]]]


@dataclass(eq=False, kw_only=True)
class _Order:
    """A prompt with its samples, until all of them are drawn."""

    request: Request
    params: SamplingParams
    seed: int
    listen: Listen | None
    answer: asyncio.Future[list[Completion]]
    finished: dict[int, Completion] = field(default_factory=dict)
    heard: Counter[int] = field(default_factory=Counter)  # sample id -> tokens given to `listen`

    def hear(self, sample_id: int, token_ids: list[int], log_probs: list[float]) -> None:
        """Give newly drawn tokens of a sample to the listener."""
        if self.listen is not None and token_ids:
            self.heard[sample_id] += len(token_ids)
            self.listen(self.request.sample_ids.index(sample_id), token_ids, log_probs)


class ServedEngine:
    """Feeds an engine from an event loop, in the order in which orders arrive.

    An engine runs requests of equal sampling parameters. An order with others waits until the
    engine has no work, and all later orders wait behind it.

    Args:
        engine: idle, with weights.
        seed: of the noise of orders without a seed.
    """

    def __init__(self, engine: RolloutEngine, *, seed: int = 0) -> None:
        self.engine = engine
        self.seed = seed
        self.counts: Counter[str] = Counter()
        # Optional for an engine: without it, streams get each reply in one piece.
        self._progress: Progress | None = getattr(engine, "progress", None)
        self._waiting: deque[_Order] = deque()
        self._running: dict[int, _Order] = {}  # by sample id
        self._params: SamplingParams | None = None  # of the running orders
        self._abandoned: set[int] = set()  # sample ids to abort before the next step
        self._numbers = itertools.count()
        self._arrived = asyncio.Event()

    async def draw(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        limit: int,
        seed: int | None = None,
        listen: Listen | None = None,
    ) -> list[Completion]:
        """Draw n replies to a prompt. A caller that is cancelled aborts them.

        Args:
            limit: most tokens of each reply.
            seed: with it, the noise depends on seed, prompt and number of the reply alone.

        Raises VerlError for a prompt that the engine cannot continue, and for its failure.
        """
        if seed is None:
            sample_ids = tuple(itertools.islice(self._numbers, n))
        else:
            sample_ids = seeded_ids(seed, prompt_ids, n)
        order = _Order(
            request=Request(
                prompt_ids=tuple(prompt_ids), sample_ids=sample_ids, limits=(limit,) * n
            ),
            params=params,
            seed=self.seed if seed is None else seed,
            listen=listen,
            answer=asyncio.get_running_loop().create_future(),
        )

        self._waiting.append(order)
        self._arrived.set()
        try:
            return await order.answer
        finally:
            self._forget(order)

    async def run(self) -> None:
        """Step the engine until cancelled. Aborts the running requests then."""
        try:
            while True:
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)

                self._arrived.clear()
                self._abort_abandoned()
                self._admit()
                if self.engine.has_work:
                    self._step()
                else:
                    await self._arrived.wait()
        finally:
            self.engine.abort()
            error = ApiError("The server is shutting down.", status=503)
            self._fail(error, also=self._waiting)

    # ---------------------------------------------------------------- inner parts

    def _abort_abandoned(self) -> None:
        abandoned = self._abandoned
        self._abandoned = set()
        if abandoned:
            self._guard(lambda: self.engine.abort(abandoned))

    def _admit(self) -> None:
        """Give the engine the orders that can run together with those that do."""
        while self._waiting:
            order = self._waiting[0]
            if self.engine.has_work and order.params != self._params:
                return
            # The same seed and prompt is being drawn: ids are unique among running samples.
            if not self._running.keys().isdisjoint(order.request.sample_ids):
                return
            self._waiting.popleft()
            self._submit(order)

    def _submit(self, order: _Order) -> None:
        try:
            self.engine.submit([order.request], order.params, seed=order.seed, step=0)
        except Exception as error:  # noqa: BLE001 - the server goes on with other requests
            _log_unexpected(error)
            order.answer.set_exception(error)
            if not self.engine.has_work:
                self._fail(error)  # a refusal leaves the others at work, a failure does not
            return
        self._params = order.params
        for sample_id in order.request.sample_ids:
            self._running[sample_id] = order

    def _step(self) -> None:
        completions = self._guard(self.engine.step) or []
        for completion in completions:
            order = self._running.pop(completion.sample_id, None)
            if order is not None:
                self._finish(order, completion)
        self._share_progress()

    def _guard(self, work: Callable[[], list[Completion]]) -> list[Completion] | None:
        """Do a work of the engine.

        If it fails, all requests at work fail, and the server goes on.
        """
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the server goes on with other requests
            _log_unexpected(error)
            self.engine.abort()
            self._fail(error)
            return None

    def _finish(self, order: _Order, completion: Completion) -> None:
        sample_id = completion.sample_id
        known = order.heard[sample_id]
        order.hear(sample_id, completion.token_ids[known:], completion.log_probs[known:])
        order.finished[sample_id] = completion
        self.counts["generated_tokens"] += len(completion.token_ids)

        is_complete = len(order.finished) == len(order.request.sample_ids)
        if is_complete and not order.answer.done():
            self.counts["requests"] += 1
            order.answer.set_result([order.finished[each] for each in order.request.sample_ids])

    def _share_progress(self) -> None:
        """Give tokens that were drawn in this step to the orders that want them at once."""
        if self._progress is None:
            return
        known = {}
        for sample_id, order in self._running.items():
            if order.listen is not None:
                known[sample_id] = order.heard[sample_id]
        if not known:
            return
        for sample_id, (token_ids, log_probs) in self._progress(known).items():
            self._running[sample_id].hear(sample_id, token_ids, log_probs)

    def _forget(self, order: _Order) -> None:
        """Take an order out that has its answer, or that is cancelled."""
        if order in self._waiting:
            self._waiting.remove(order)
        running = [each for each in order.request.sample_ids if self._running.get(each) is order]
        for sample_id in running:
            del self._running[sample_id]
        if running:
            self._abandoned.update(running)
            self._arrived.set()
            self.counts["aborted"] += 1

    def _fail(self, error: Exception, also: Iterable[_Order] = ()) -> None:
        """Answer all running orders, and others, with an error."""
        orders = {*self._running.values(), *also}
        self._running = {}
        for order in orders:
            if not order.answer.done():
                order.answer.set_exception(error)


@dataclass(eq=False)
class ServedBackend:
    """A `Backend` for a model alone. It keeps no sessions.

    Args:
        engine: draws the replies.
        wording: between messages and tokens.
        params: of requests that do not name their own.
        max_model_len: most tokens of a prompt and its reply together.
        api_key: that every request needs.
        model: the name that clients get.
        is_lenient: whether to ignore fields that the engine cannot honor.
    """

    engine: ServedEngine
    wording: Wording
    _: KW_ONLY
    params: SamplingParams
    max_model_len: int
    api_key: str = field(repr=False)
    model: str
    is_lenient: bool = False

    def admit(self, key: str, session: str | None) -> str | None:
        """See `Backend.admit`."""
        if not same_key(self.api_key, key):
            raise wrong_key()
        if session is not None:
            raise ApiError("This server keeps no sessions. Use the address /v1.", status=404)
        return None

    async def run(self) -> None:
        """See `Backend.run`: step the engine."""
        await self.engine.run()

    async def chat(
        self, session: str | None, request: ChatRequest, listen: Listen | None = None
    ) -> list[Reply]:
        """See `Backend.chat`."""
        self._check_model(request.model)
        self.wording.check_tools(request.tools)
        prompt_ids = self.wording.chat_prompt(request.messages, request.tools)
        return await self._answer(prompt_ids, request.draw, request.tools, listen)

    async def complete(
        self, session: str | None, request: CompletionRequest, listen: Listen | None = None
    ) -> list[Reply]:
        """See `Backend.complete`."""
        self._check_model(request.model)
        answers = []
        for number, prompt in enumerate(request.prompts):
            heard = None
            if listen is not None:
                heard = _from(number * request.draw.n, listen)
            ids = self.wording.text_prompt(prompt)
            answers.append(self._answer(ids, request.draw, (), heard))
        return list(itertools.chain.from_iterable(await gather_all(answers)))

    async def _answer(
        self,
        prompt_ids: Sequence[int],
        draw: DrawSettings,
        tools: ToolSchemas,
        listen: Listen | None,
    ) -> list[Reply]:
        params = self.params_of(draw)
        limit = room_for_reply(prompt_ids, self.max_model_len, draw)
        try:
            drawn = await self.engine.draw(
                prompt_ids, params, n=draw.n, limit=limit, seed=draw.seed, listen=listen
            )
        except ApiError:
            raise
        except VerlError as error:
            raise ApiError(str(error), status=500) from error

        name = secrets.token_hex(8)
        reply = partial(self.wording.reply, prompt_ids, tools=tools, stop=params.stop)
        return [await reply(each, name=f"{name}/{number}") for number, each in enumerate(drawn)]

    def stops(self, draw: DrawSettings) -> tuple[str, ...]:
        """See `Backend.stops`."""
        return self.params_of(draw).stop

    def params_of(self, draw: DrawSettings) -> SamplingParams:
        """Return the sampling parameters of a request.

        Their `max_new_tokens` is the same for all, so that requests with other limits run together.
        """
        asked = {}
        for name in ("temperature", "top_p", "top_k", "min_p", "stop"):
            value = getattr(draw, name)
            if value is not None:
                asked[name] = value
        return replace(self.params, max_new_tokens=self.max_model_len, **asked)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.model:
            raise unknown_model(model, self.model)


def seeded_ids(seed: int, prompt_ids: Sequence[int], n: int) -> tuple[int, ...]:
    """Return sample ids below 0 that depend on seed, prompt and number alone.

    Ids fix the noise of a draw. Those of orders without a seed count up from 0.
    """
    text = f"{seed}:{','.join(map(str, prompt_ids))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "big") >> 1  # 63 bits
    return tuple(-1 - (start + number) % 2**63 for number in range(n))


def _from(first: int, listen: Listen) -> Listen:
    """Return a listener that numbers choices from `first`."""
    return lambda number, ids, log_probs: listen(first + number, ids, log_probs)


def _log_unexpected(error: Exception) -> None:
    if not isinstance(error, VerlError):
        trace = "".join(traceback.format_exception(error))
        logger.error("The engine failed, and its requests with it:\n%s", trace)
