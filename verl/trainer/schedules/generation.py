"""Generation as asynchronous schedules drive it: the samples of a book, on a group of engines."""

from collections.abc import Callable, Sequence

from verl.rollout import Completion, Continuation, Request, SamplingParams
from verl.single_controller import GroupOf, num_shares, of_each_share
from verl.trainer.schedules.book import Book, Group, State
from verl.workers import RolloutWorker
from verl.workers.stream import Orders


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

    def advance(self, most_steps: int | None = None) -> None:
        """Generate until the next batch can be taken, or for `most_steps` steps of the engines."""
        goals = self.book.goal().shares(num_shares(self._rollout))
        steps = [most_steps] * len(goals)
        answers = of_each_share(self._rollout.advance_samples, goals, steps)
        for news in answers:
            _enter(self.book.finish, news.finished)
        self.seconds += max(news.seconds for news in answers)

    def freeze(self) -> None:
        """Take all samples out of the engines, which leave the device to the trainer."""
        has_run = self.is_running or bool(self.seconds)
        for news in of_each_share(self._rollout.freeze_samples):
            _enter(self.book.finish, news.finished)
            _enter(self.book.freeze, news.frozen)
            if has_run:
                self.metrics = news.metrics

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
        )


def prompt_ids_of(group: Group) -> tuple[int, ...]:
    """Return the tokens of a group's prompt."""
    return tuple(map(int, group.payload.non_tensor_batch["raw_prompt_ids"][0]))


def _enter(record: Callable[..., None], completions: Sequence[Completion]) -> None:
    for completion in completions:
        record(completion.sample_id, completion.token_ids, completion.log_probs)
