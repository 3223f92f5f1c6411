"""An engine without a model: each running sample draws one token a tick, up to a fixed length."""

from collections.abc import Callable

from verl.rollout.book import Book
from verl.rollout.goal import GoalWatch


class FakeEngine:
    """Runs the samples of a book on a clock of ticks.

    Args:
        book: whose samples run.
        length_of: the length of a sample, by its id.
        slots: samples that draw in one tick; the others wait in order of submission.
    """

    def __init__(self, book: Book, length_of: Callable[[int], int], slots: int) -> None:
        self.book = book
        self.length_of = length_of
        self.slots = slots
        self.drawn: dict[int, list[int]] = {}  # of running samples: position -> token
        self.ticks = 0

    def start(self) -> None:
        """Submit what the book lets start."""
        for group in self.book.start():
            for sample in group.samples:
                if sample.state == "running" and sample.sample_id not in self.drawn:
                    self.drawn[sample.sample_id] = list(sample.token_ids)

    def tick(self) -> list[int]:
        """Draw one token each; return the samples that have ended."""
        self.ticks += 1
        ended = []
        for sample_id in list(self.drawn)[: self.slots]:
            tokens = self.drawn[sample_id]
            tokens.append(sample_id * 1000 + len(tokens))
            if len(tokens) == self.length_of(sample_id):
                ended.append(sample_id)
        for sample_id in ended:
            self._report(sample_id, self.book.finish)
        return ended

    def run_to_goal(self) -> None:
        """Generate until the next batch can be taken."""
        watch = GoalWatch(self.book.goal())
        while not watch.is_reached:
            assert self.drawn, "the goal asks for more than runs"
            watch.note(self.tick())

    def freeze(self) -> None:
        """Take all samples out of the engine."""
        for sample_id in list(self.drawn):
            self._report(sample_id, self.book.freeze)

    def _report(self, sample_id: int, to: Callable[..., None]) -> None:
        tokens = self.drawn.pop(sample_id)
        to(sample_id, tokens, [-1.0] * len(tokens))
