"""Training from a program or a notebook: one object that trains, rolls out and scores."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch

from verl.config import RolloutConfig, TrainConfig
from verl.config.keys import keys_of, value_at
from verl.config.keywords import assign, config_from_keywords, with_options
from verl.config.placement import ranks_of_roles
from verl.config.rules import training_data_is_named
from verl.diagnostics.parts import load_user_code
from verl.diagnostics.view.notebook import Page, load_run
from verl.protocol import DataProto
from verl.tracking.records import FOLDER
from verl.trainer import setup
from verl.trainer.asked_prompts import AskedPrompts, listed
from verl.trainer.episodes import whole_episodes
from verl.trainer.given_parts import check_flag, check_number
from verl.trainer.handed_out import ClosedRun, LiveRole, StepMetrics
from verl.trainer.one_call import OneCall
from verl.trainer.response_scores import FunctionScorer, RewardModelScorer, scores_of
from verl.trainer.variants import trainer_class
from verl.utils.errors import ConfigError, DataError
from verl.utils.garbage import free_memory
from verl.utils.logging import show_log
from verl.workers.reward_inputs import compute_reward


def train(config: Any = None, **keywords: Any) -> "RLTrainer":
    """Make an `RLTrainer`, train it to the last step, and return it.

    Args:
        config: see `RLTrainer`.
        keywords: see `RLTrainer`.

    Returns:
        The trainer, with the last step's `metrics`.

    Example:
        ```python
        import verl

        trainer = verl.train({"data.dataset_name": "toy"}, lr=1e-3)
        print(trainer.metrics)
        ```
    """
    trainer = RLTrainer(config, **keywords)
    trainer.train()
    return trainer


class RLTrainer:
    """Train a causal LM on prompts and a reward, roll out with it, and score its responses.

    The constructor checks keys, engine, data and reward. Models are loaded at the first call that
    needs one. Under torchrun the constructor returns on rank 0 only, see `PPOTrainer`. The log is
    shown as the commands show it. `logging.getLogger("verl").setLevel(logging.WARNING)` before the
    call makes it quiet, and `trainer.logger=[]` leaves out the lines of steps.

    Args:
        config: a TrainConfig, keys of the tree (nested or dotted), or the path of a YAML file.
        tokenizer: replaces the tokenizer that the configuration names.
        reward_fn: scores batches of responses in training, instead of the configured reward.
        val_reward_fn: scores batches of responses in validation, instead of the configured reward.
        train_dataset: rows to train on, instead of `data.train_files`.
        val_dataset: rows to validate on, instead of `data.val_files`.
        keywords: replace values of `config`: actor_placement, critic_placement,
            reference_placement and reward_model_placement (lists of ranks); actor_config,
            rollout_config, critic_config and ray_config (mappings); backend, max_new_tokens,
            gradient_clip_val, lr and sglang_endpoint; enable_hybrid_engine; the arguments of
            `train`; sections of the tree (`data={...}`) and its keys (`**{"trainer.max_steps":
            2}`), those of trainer, data, algorithm and rollout also alone (`max_steps=2`). A
            `config` may hold these too.

    Example:
        ```python
        from verl.trainer import RLTrainer

        trainer = RLTrainer({"data.dataset_name": "toy"}, lr=1e-3, rollout_config={"n": 8})
        trainer.train(micro_batch_size=8, gradient_accumulation_steps=8)
        print(trainer.rollout(["3 + 11 = ?"]))
        trainer.close()
        ```

        Several trainers, one after the other:

        ```python
        for lr in (1e-4, 1e-3):
            with RLTrainer({"data.dataset_name": "toy"}, lr=lr) as trainer:
                print(lr, trainer.train())
        ```
    """

    def __init__(
        self,
        config: Any = None,
        *,
        tokenizer: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        **keywords: Any,
    ) -> None:
        show_log()
        self.config: TrainConfig = config_from_keywords(config, keywords)
        self.missing: str | None = None  # how to name training data, if there is none
        if train_dataset is None:
            self.missing = next(iter(training_data_is_named(self.config)), None)
        self.has_own_reward = reward_fn is not None

        if self.missing is not None:
            load_user_code(self.config)
            tokenizer = setup.actor_tokenizer(self.config, tokenizer)
            reward_fn = setup.training_reward(self.config, tokenizer, reward_fn)
            train_dataset = _NoRows(self.config.data.train_batch_size)

        self.ppo: Any = trainer_class(self.config)(
            self.config,
            tokenizer=tokenizer,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
        )
        self.has_models = self.has_trained = False
        self._calls = OneCall()

    def __repr__(self) -> str:
        trainer = self.config.trainer
        mode = "val_only" if trainer.val_only else trainer.mode
        model = self.config.actor_rollout_ref.model.path

        step = f"step {self.ppo.global_step} of {self.ppo.total_steps}"
        if self.missing is not None:
            step = "no training data"

        models = "models loaded" if self.has_models else "models not loaded"
        if self._calls.is_closed:
            models = "closed"
        return f"<RLTrainer {mode} of {model}: {step}, {models}, in {self.ppo.checkpoints.root}>"

    # ---------------------------------------------------------------- properties

    @property
    def tokenizer(self) -> Any:
        """Return the actor's tokenizer."""
        return self.ppo.tokenizer

    @property
    def rollout_config(self) -> RolloutConfig:
        """Return the section that says how responses are drawn, in training and by `rollout`."""
        return self.config.actor_rollout_ref.rollout

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the latest training step; empty before the first."""
        return self.ppo.metrics

    @property
    def critic(self) -> LiveRole:
        """Return the critic; its `model` is the module that is trained.

        Raises:
            ConfigError: this run has no critic.
        """
        if not self.config.needs_critic:
            raise ConfigError(
                "This run has no critic, for "
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} needs none. Set "
                "algorithm.adv_estimator=gae."
            )
        self._calls.require_open("critic")
        self._load_models()
        return LiveRole("critic", self.ppo.critic_wg, ranks_of_roles(self.config)["critic"])

    # ---------------------------------------------------------------- actions

    def train(
        self,
        *,
        micro_batch_size: int | None = None,
        gradient_accumulation_steps: int | None = None,
        amp: bool | None = None,
    ) -> StepMetrics:
        """Train to the last step, and return its metrics.

        Training resumes from the newest checkpoint, if one exists. With `trainer.val_only` the
        metrics are those of the validation.

        Args:
            micro_batch_size: responses in a forward-backward pass of one rank.
            gradient_accumulation_steps: passes in an update of one rank. The product of both, over
                all ranks, is the number of responses in an update, which holds whole prompts:
                `ppo_mini_batch_size` (prompts) times `rollout.n`.
            amp: True computes in bfloat16 over float32 parameters (the default on CUDA), False in
                float32.

        Returns:
            A dict of metrics that prints as one line.

        Raises:
            ConfigError: `train` has run already, or a size does not fit.
            DataError: the configuration names no training data.
            WorkerError: it runs in another thread now.
        """
        with self._calls.of("train"):
            return self._train(
                micro_batch_size=micro_batch_size,
                gradient_accumulation_steps=gradient_accumulation_steps,
                amp=amp,
            )

    def rollout(
        self,
        prompts: Any,
        *,
        n: int = 1,
        greedy: bool = False,
        seed: int | None = None,
        as_batch: bool = False,
    ) -> Any:
        """Generate responses to B prompts with the current weights, as `rollout_config` says.

        Args:
            prompts: texts, each a message of the user; chats, lists of {"role", "content"}; or a
                DataProto with the column `raw_prompt_ids`. `data.truncation` applies to a prompt
                longer than `data.max_prompt_length`. Where the model reads pictures, a content may
                have parts such as {"type": "image", "image": "a.png"}.
            n: responses to each prompt.
            greedy: always take the most likely token.
            seed: seed of the noise; equal seeds give equal responses. None: a seed that training
                never uses.
            as_batch: return a DataProto of B * n rows, as training has it after its rollout.

        Returns:
            B texts without special tokens; for n > 1 B lists of n texts.

        Raises:
            DataError: no prompt is given, or one is not a prompt or too long; the message has its
                number.
            ConfigError: another argument has a wrong type or value.
            RolloutError: the engine did not answer every prompt.
            WorkerError: `train` runs in another thread.
        """
        check_number("rollout", "n", n)
        check_flag("rollout", "greedy", greedy)
        check_flag("rollout", "as_batch", as_batch)
        if seed is None:
            seed = self.rollout_config.seed + 2  # training has the first, validation the second
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            raise ConfigError(f"rollout(seed=...) must be a whole number or None, got {seed!r}.")

        batch = self._asked.batch(prompts)
        params = setup.sampling_params(self.rollout_config)
        if greedy:
            params = replace(params, temperature=0.0)
        with self._calls.of("rollout"):
            self._load_models()
            batch = self.ppo._generate(batch, n, params, int(seed), step=0)

        if as_batch:
            return batch

        batch = whole_episodes(batch)  # one text for each episode of agents
        ids = []
        for row, mask in zip(batch.batch["responses"], batch.batch["response_mask"].bool()):
            ids.append(row[mask].tolist())
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        if n == 1:
            return texts
        return [texts[start : start + n] for start in range(0, len(texts), n)]

    def compute_reward(
        self,
        responses: Any,
        prompts: Any = None,
        *,
        data_source: Any = None,
        ground_truth: Any = None,
        extra_info: Any = None,
    ) -> torch.Tensor:
        """Score B responses by the reward model, or by the reward function if there is none.

        Args:
            responses: texts, or a batch of `rollout(..., as_batch=True)`. A reward model also
                takes token ids of its own tokenizer, see
                `verl.workers.reward_inputs.compute_reward`.
            prompts: B texts or chats, or one text for all; a batch has its own.
            data_source: picks the reward rule; one value for all responses, or a list of B.
            ground_truth: the right answer; one value for all responses, or a list of B.
            extra_info: further input of the reward function; one value for all, or a list of B.

        Returns:
            (B,) finite scores in fp32.

        Raises:
            RewardError: a response is empty or too long, or has no finite score; the message has
                its number.
            ConfigError: nothing here can score these responses.
            WorkerError: `train` runs in another thread, and its models or its manager score these.
        """
        columns = {
            "data_source": data_source,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        by_model = self.config.reward_model.enable
        if isinstance(responses, DataProto):
            _refuse_unread(
                {"prompts": prompts, **columns},
                "for texts, but the responses are a batch with columns of its own",
            )
            with self._calls.of("compute_reward"):
                if by_model:
                    self._load_models()
                return scores_of(self.ppo.reward_fn, self.ppo.add_rm_scores(responses.select()))

        if by_model:
            _refuse_unread(
                columns, "for texts and a reward function, but here the reward model scores"
            )
            with self._calls.of("compute_reward"):
                self._load_models()
                return compute_reward(self._reward_model, responses, prompts)

        if self.has_own_reward:
            raise ConfigError(
                "reward_fn reads batches of tokens, so compute_reward cannot call it on texts. "
                "Give it a batch: compute_reward(trainer.rollout(prompts, as_batch=True))."
            )

        self._calls.require_open("compute_reward")
        return self._reward_function.score(
            listed("compute_reward", "responses", responses), prompts, columns
        )

    def show(self, *, height: int = 700) -> Page:
        """Return the page of `verl view` about this run, for a cell of a notebook.

        Args:
            height: of the cell, in pixels.

        Raises:
            ConfigError: `height` is no whole number above 0.
            DataError: nothing is recorded yet, or `trainer.record.enable` is False.
        """
        check_number("show", "height", height)
        root = self.ppo.checkpoints.root
        if not (root / FOLDER).is_dir():
            raise DataError(
                f"Nothing is recorded in {root} yet. Call train() first; "
                "trainer.record.enable=true records."
            )
        return load_run(root).show(height=height)

    def close(self) -> None:
        """End the processes, servers and threads of this trainer, and free its models.

        For a program that makes several trainers, one after the other: each takes the memory and
        the GPUs of the one before. `config`, `tokenizer`, `metrics` and `show` can still be used.
        Weights without a checkpoint are lost. A second call does nothing. Under torchrun the other
        ranks end, so this is the program's last trainer.

        Raises:
            WorkerError: `train` runs in another thread, or this is a call within another one.
        """
        if self._calls.is_closed:
            return
        with self._calls.last("close"):
            run = self.ppo
            self.ppo = ClosedRun(
                run.tokenizer, run.metrics, run.checkpoints, run.global_step, run.total_steps
            )
            for part in ("_reward_model", "_reward_function", "_asked"):
                vars(self).pop(part, None)  # cached; they keep models and processes
            try:
                run.close()
            finally:
                del run
                free_memory()

    def __enter__(self) -> "RLTrainer":
        self._calls.require_open("__enter__")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---------------------------------------------------------------- parts

    @cached_property
    def _asked(self) -> AskedPrompts:
        return AskedPrompts(self.config, self.tokenizer)

    @cached_property
    def _reward_model(self) -> RewardModelScorer:
        return RewardModelScorer(self.config, self.ppo.rm_wg)

    @cached_property
    def _reward_function(self) -> FunctionScorer:
        return FunctionScorer(self.config, self.tokenizer)

    def _train(self, **options: Any) -> StepMetrics:
        if self.has_trained:
            way_on = "it begins anew, because no checkpoint was written (trainer.save_freq)"
            if self.ppo.checkpoints.newest_name() is not None:
                way_on = (
                    "with a larger trainer.total_training_steps it goes on from the newest "
                    "checkpoint"
                )
            raise ConfigError(
                f"train() has run already, to step {self.ppo.global_step} of "
                f"{self.ppo.total_steps}. Make a new RLTrainer: {way_on}."
            )

        if self.missing is not None:
            raise DataError(self.missing)
        self._set_options(**options)
        self._load_models()

        self.has_trained = True
        self.ppo.fit()
        return StepMetrics(self.metrics)

    def _load_models(self) -> None:
        if not self.has_models:
            # A cell of a notebook that runs again has dropped a trainer without closing it.
            free_memory()
            self.ppo.init_workers()
            self.has_models = True

    def _set_options(self, **options: Any) -> None:
        changed = with_options(self.config, options)
        if changed is self.config:
            return
        if self.has_models:
            dtypes = []
            for key in keys_of(TrainConfig):
                is_changed = value_at(changed, key) != value_at(self.config, key)
                if is_changed and key.endswith("dtype"):
                    dtypes.append(key)
            if dtypes:
                raise ConfigError(
                    f"amp={options['amp']} changes {dtypes[0]}, but the models are loaded already. "
                    f"Give it to RLTrainer(amp={options['amp']}), or train before anything else."
                )

        assign(self.config, changed)
        if self.has_models:
            self.ppo.renew_sizes()


def _refuse_unread(columns: Mapping[str, Any], reason: str) -> None:
    """Raise ConfigError for inputs of `compute_reward` that this call does not read."""
    given = [name for name, value in columns.items() if value is not None]
    if given:
        names = " and ".join(given)
        raise ConfigError(f"compute_reward reads {names} {reason}. Leave out {names}.")


class _NoRows:
    """Stands in for missing training data, which `train` refuses."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"raw_prompt_ids": [0]}  # for checks at start; `train` is refused before it reads
