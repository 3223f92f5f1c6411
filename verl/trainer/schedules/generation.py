"""Generation as asynchronous schedules drive it: the samples of a book, on a group of engines."""

import threading
from collections.abc import Callable, Sequence

from verl.rollout import Completion, Continuation, Request, SamplingParams
from verl.rollout.goal import Goal
from verl.single_controller import GroupOf, num_shares, of_each_share
from verl.trainer.schedules.book import Book, Group, State
from verl.workers import RolloutWorker
from verl.workers.rollout import pictures_of
from verl.workers.stream import Orders

# Steps of the engines between two looks at whether the trainer wants the rollout to pause.
_STEPS_AHEAD = 16
_NEVER = Goal((), ((1, 1),))


class Generation:
    """Starts, advances and freezes the samples of a book.

    Args:
        book: the samples, and the rules by which they start.
        rollout: the engines.
        params, seed: of all draws.
    """

    def __init__(
        self, book: Book, rollout: GroupOf[RolloutWorker], params: SamplingParams, seed: int
    ) -> None:
        self.book = book
        self.metrics: dict[str, float] = {}  # of the engines, since they last began to work
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
        self._advance(self.book.goal().shares(num_shares(self._rollout)), None)

    def run_ahead(self) -> None:
        """Generate in a thread until `pause`, on ranks that the trainer does not need meanwhile.

        The books belong to that thread until then.
        """
        if self.is_running:
            self._thread = threading.Thread(
                target=self._run_ahead, name="verl-generation", daemon=True
            )
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
            while self.is_running and not self._is_paused.is_set():
                self._advance(goals, _STEPS_AHEAD)
        except Exception as error:  # noqa: BLE001 - raised by `pause`
            self._error = error

    def _advance(self, goals: Sequence[Goal], most_steps: int | None) -> None:
        steps = [most_steps] * len(goals)
        answers = of_each_share(self._rollout.advance_samples, list(goals), steps)
        for news in answers:
            _enter(self.book.finish, news.finished)
        self.seconds += max(news.seconds for news in answers)

    def freeze(self) -> None:
        """Take all samples out of the engines."""
        self.pause()
        if self._has_started:
            self.leave_device()

    def leave_device(self) -> None:
        """Take all samples out of the engines, which leave the device to the trainer."""
        answers = of_each_share(self._rollout.freeze_samples)
        for news in answers:
            _enter(self.book.finish, news.finished)
            _enter(self.book.freeze, news.frozen)
        if self._has_started:
            self.metrics = answers[0].metrics  # of all engines
        self._has_started = False

    def _request(self, group: Group) -> Request:
        """Return the request for the samples of a group that have just begun to run."""
        samples = [sample for sample in group.samples if sample.state is State.RUNNING]
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


def prompt_ids_of(group: Group) -> tuple[int, ...]:
    """Return the tokens of a group's prompt."""
    return tuple(map(int, group.payload.non_tensor_batch["raw_prompt_ids"][0]))


def _enter(record: Callable[..., None], completions: Sequence[Completion]) -> None:
    for completion in completions:
        record(completion.sample_id, completion.token_ids, completion.log_probs)
