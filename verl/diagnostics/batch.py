"""The arithmetic of a batch: how many rows and passes everything makes."""

from dataclasses import dataclass

from verl.config import TrainConfig
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One training step. Rows are responses, ranks the actor's; `rows_a_rank` are those of a
    mini-batch on one data-parallel rank."""

    prompts: int
    samples: int  # of each prompt
    rows: int
    longest: int  # tokens of the longest row
    prompt_share: float  # of its tokens
    mini_batches: int
    epochs: int
    updates: int
    ranks: int
    data_ranks: int
    rows_a_rank: int

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return round(self.longest * self.prompt_share)

    @classmethod
    def of(cls, config: TrainConfig, ranks: int) -> "BatchPlan":
        """Size the batches of a run. Raises ConfigError where ranks do not divide the rows."""
        actor = config.actor_rollout_ref.actor
        rollout = config.actor_rollout_ref.rollout
        data = config.data
        data_ranks = ranks // actor.ulysses_sequence_parallel_size
        mini_prompts = actor.ppo_mini_batch_size or data.train_batch_size
        mini_rows = mini_prompts * rollout.n

        is_whole = mini_prompts == data.train_batch_size  # and padded
        if data_ranks < 1 or (mini_rows % data_ranks and not is_whole):
            raise ConfigError(
                f"The data-parallel ranks must divide the rows of a mini-batch ({mini_prompts} "
                f"prompts x {rollout.n}), got {data_ranks} and {mini_rows}. Set "
                "actor_rollout_ref.actor.ppo_mini_batch_size to a multiple of "
                f"{max(1, data_ranks)}."
            )

        longest = data.max_prompt_length + data.max_response_length
        mini_batches = data.train_batch_size // mini_prompts
        return cls(
            prompts=data.train_batch_size,
            samples=rollout.n,
            rows=data.train_batch_size * rollout.n,
            longest=longest,
            prompt_share=data.max_prompt_length / longest,
            mini_batches=mini_batches,
            epochs=actor.ppo_epochs,
            updates=mini_batches * actor.ppo_epochs,
            ranks=ranks,
            data_ranks=data_ranks,
            rows_a_rank=ceil_div(mini_rows, data_ranks),
        )

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts x {self.samples} samples = {self.rows} rows of at most "
            f"{self.longest} tokens; {self.mini_batches} mini-batch(es) x {self.epochs} epoch(s) = "
            f"{self.updates} update(s) a step; {self.ranks} rank(s), {self.data_ranks} with rows "
            f"of their own, {self.rows_a_rank} rows of a mini-batch each"
        )
