"""Generation as asynchronous schedules drive it: the samples of a book, on a group of engines."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from verl.models.pictures import pictures_of
from verl.rollout import Completion, Continuation, Request, SamplingParams
from verl.rollout.book import Book, Group, State
from verl.rollout.goal import Goal
from verl.single_controller import GroupOf, num_shares, of_each_share
from verl.workers import RolloutWorker
from verl.workers.stream import EpisodeOrders, GroupOrder, Orders, Progressed

# Steps of the engines between two looks at whether the trainer wants the rollout to pause.
_STEPS_AHEAD = 16
_NEVER = Goal((), ((1, 1),))


class Generation:
    """Starts, advances and freezes the samples of a book.

    Args:
        book: the samples, and the rules by which they start.
        rollout: the engines.
        params, seed: of all draws.
        keep_kv_cache: whether engines hold the keys and values of frozen samples.
    """

    def __init__(
        self,
        book: Book,
        rollout: GroupOf[RolloutWorker],
        params: SamplingParams,
        seed: int,
        *,
        keep_kv_cache: bool = False,
    ) -> None:
        self.book = book
        self.keep_kv_cache = keep_kv_cache
        # of the engines, since they last began to work; empty if they have not since the last step
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0  # in which the engines worked
        self._rollout = rollout
        self._params = params
        self._seed = seed
        self._has_started = False  # samples, since the last `freeze`
        self._thread: threading.Thread | None = None
        self._is_paused = threading.Event()
        self._error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Whether samples are in the engines."""
        return self.book.counts()[State.RUNNING.value] > 0

    def start(self) -> None:
        """Submit all samples that may run; groups go to the engines in turn, oldest first."""
        requests = [self._request(group) for group in self.book.start()]
        if not requests:
            return
        shares = num_shares(self._rollout)
        orders = []
        for share in range(shares):
            own = requests[share::shares]
            orders.append(Orders(requests=own, params=self._params, seed=self._seed))
        of_each_share(self._rollout.start_samples, orders)
        self._has_started = True

    def advance(self) -> None:
        """Generate until the next batch can be taken."""
        self._advance(self._goals(), None)

    def run_ahead(self) -> None:
        """Start samples and generate in a thread until `pause`, on ranks that the trainer does not
        need meanwhile.

        The books belong to that thread until then.
        """
        self._thread = threading.Thread(target=self._run_ahead, name="verl-generation", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop `run_ahead`, and raise its error if it had one. The samples stay in the engines."""
        if self._thread is None:
            return
        self._is_paused.set()
        self._thread.join()
        self._thread = None
        self._is_paused.clear()
        if self._error is not None:
            raise self._error

    def _run_ahead(self) -> None:
        goals = [_NEVER] * num_shares(self._rollout)
        try:
            started = time.perf_counter()
            self.start()  # a validation may be in the engines before
            self.seconds += time.perf_counter() - started
            while self.is_running and not self._is_paused.is_set():
                self._advance(goals, _STEPS_AHEAD)
        except Exception as error:  # noqa: BLE001 - raised by `pause`
            self._error = error

    def _advance(self, goals: Sequence[Goal], most_steps: int | None) -> None:
        answers = self._advance_engines(list(goals), [most_steps] * len(goals))
        for news in answers:
            _enter(self.book.finish, news.finished)
        self.seconds += max(news.seconds for news in answers)

    def _goals(self) -> list[Goal]:
        """Return the part of each engine in the goal of the book."""
        return self.book.goal().shares(num_shares(self._rollout))

    def _advance_engines(self, goals: list[Goal], most_steps: list[int | None]) -> list[Progressed]:
        """Advance each engine to its goal, by as many steps at most; None: no limit."""
        return of_each_share(self._rollout.advance_samples, goals, most_steps)

    def freeze(self) -> None:
        """Take all samples out of the engines."""
        self.pause()
        if self._has_started:
            self.leave_device()

    def forget_kept(self) -> None:
        """Let frozen samples compute their keys and values anew, as a resumed run does."""
        if self.keep_kv_cache:
            self._rollout.forget_kept()

    def leave_device(self) -> None:
        """Take all samples out of the engines, which leave the device to the trainer."""
        answers = self._freeze_engines()
        if self._has_started:
            self.metrics = answers[0].metrics  # of all engines
        self._has_started = False

    def _keeps(self) -> list[bool]:
        """Return for each engine whether it holds the keys and values of frozen samples."""
        return [self.keep_kv_cache] * num_shares(self._rollout)

    def _freeze_engines(self) -> list[Progressed]:
        answers = of_each_share(self._rollout.freeze_samples, self._keeps())
        for news in answers:
            _enter(self.book.finish, news.finished)
            _enter(self.book.freeze, news.frozen)
        return answers

    def _request(self, group: Group) -> Request:
        """Return the request for the samples of a group that have just begun to run."""
        samples = group.running
        first = group.serial * self.book.num_samples
        begun = []
        for sample in samples:
            number = group.row * self.book.num_samples + sample.sample_id - first
            begun.append(
                Continuation(
                    step=group.step,
                    number=number,
                    token_ids=sample.token_ids,
                    log_probs=sample.log_probs,
                )
            )
        return Request(
            prompt_ids=prompt_ids_of(group),
            sample_ids=tuple(sample.sample_id for sample in samples),
            continuations=tuple(begun),
            pictures=pictures_of(group.payload)[0],
        )


class EpisodeGeneration(Generation):
    """Generation by agent loops: an episode stays with the engine where it began.

    Tools go on while an engine stands still.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._homes: dict[int, int] = {}  # group -> engine

    def start(self) -> None:
        """Begin all episodes that may, where fewest are at work, and let the others go on."""
        started = self.book.start()
        if not started:
            return
        at_work = self._count_at_work()
        begun: list[list[GroupOrder]] = [[] for _ in range(num_shares(self._rollout))]
        for group in started:
            if group.serial in self._homes:
                continue  # its episodes go on by themselves
            home = min(range(len(begun)), key=lambda share: at_work[share])
            order = self._order(group)
            self._homes[group.serial] = home
            begun[home].append(order)
            at_work[home] += len(order.samples)

        orders = []
        for share, groups in enumerate(begun):
            orders.append(
                EpisodeOrders(
                    groups=groups,
                    n=self.book.num_samples,
                    params=self._params,
                    seed=self._seed,
                    version=self.book.version,
                    num_at_work=at_work[share],
                )
            )
        of_each_share(self._rollout.start_episodes, orders)
        self._has_started = True

    def _count_at_work(self) -> Counter[int]:
        """Count the episodes at work in each engine. Forgets the homes of groups that are whole."""
        known = self._homes
        self._homes = {}
        at_work: Counter[int] = Counter()
        for group in self.book.groups:
            if group.serial in known and not group.is_whole:
                self._homes[group.serial] = known[group.serial]
                at_work[known[group.serial]] += len(group.running)
        return at_work

    def _order(self, group: Group) -> GroupOrder:
        first = group.serial * self.book.num_samples
        return GroupOrder(
            prompt=group.payload,
            step=group.step,
            first_id=first,
            samples=tuple(sample.sample_id - first for sample in group.running),
        )

    def _goals(self) -> list[Goal]:
        goal = self.book.goal()
        homes = []
        for sample_ids in goal.groups:
            homes.append(self._homes[sample_ids[0] // self.book.num_samples])
        return goal.shares(num_shares(self._rollout), homes)

    def _advance_engines(self, goals: list[Goal], most_steps: list[int | None]) -> list[Progressed]:
        answers = of_each_share(self._rollout.advance_episodes, goals, most_steps)
        self._enter_episodes(answers)
        return answers

    def _freeze_engines(self) -> list[Progressed]:
        answers = of_each_share(self._rollout.freeze_episodes, self._keeps())
        self._enter_episodes(answers)
        for group in self.book.groups:
            for sample in group.running:
                self.book.suspend(sample.sample_id)
        return answers

    def _enter_episodes(self, answers: Sequence[Progressed]) -> None:
        for news in answers:
            for sample_id, trajectories in news.episodes:
                self.book.finish_episode(sample_id, trajectories)


def prompt_ids_of(group: Group) -> tuple[int, ...]:
    """Return the tokens of a group's prompt."""
    return tuple(map(int, group.payload.non_tensor_batch["raw_prompt_ids"][0]))


def _enter(record: Callable[..., None], completions: Sequence[Completion]) -> None:
    for completion in completions:
        record(completion.sample_id, completion.token_ids, completion.log_probs)
