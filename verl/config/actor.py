"""The policy update."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.checkpoint import CheckpointConfig
from verl.config.choices import (
    KL_ESTIMATORS,
    LOSS_AGGREGATIONS,
    ROUTER_REPLAYS,
    STRATEGIES,
)
from verl.config.fsdp import FSDPConfig
from verl.config.optim import OptimConfig
from verl.config.setting import alias, setting

_ALWAYS_CHUNKED = "entropy is always computed in recomputed chunks"


@dataclass(kw_only=True, slots=True)
class PolicyLossConfig:
    loss_mode: str = setting(
        "vanilla",
        (
            "registered policy loss: vanilla (PPO's, dual clip), gspo, cispo, sapo, gpg, clip_cov, "
            "kl_cov, geo_mean, dppo, dppo_tv, dppo_kl, dro"
        ),
    )
    clip_cov_ratio: float = setting(
        0.0002, "clip_cov: share of tokens that lose their gradient", at_least=0, at_most=1
    )
    clip_cov_lb: float = setting(1.0, "clip_cov: smallest covariance that is cut")
    clip_cov_ub: float = setting(5.0, "clip_cov: largest covariance that is cut")
    kl_cov_ratio: float = setting(
        0.0002, "kl_cov: share of tokens with a KL penalty", at_least=0, at_most=1
    )
    ppo_kl_coef: float = setting(
        0.1, "kl_cov: coefficient of that penalty", at_least=0, finite=True
    )
    tau_pos: float = setting(
        1.0, "sapo: steepness of the gate where the advantage is positive", above=0
    )
    tau_neg: float = setting(1.05, "sapo: steepness of the gate where it is negative", above=0)
    dppo_divergence: str = setting("tv", "dppo: total variation or KL", choices=("tv", "kl"))
    dppo_threshold: float = setting(
        0.15,
        "dppo, dppo_tv: divergence beyond which a token moves no further; kl: 0.05",
        at_least=0,
    )
    dppo_kl_threshold: float = setting(
        0.05, "dppo_kl: divergence beyond which a token moves no further", at_least=0
    )
    dro_beta: float = setting(0.05, "dro: weight of the squared log ratio", at_least=0, finite=True)
    loss_kwargs: dict[str, Any] = setting(
        {}, "further keyword arguments of a policy loss of your own"
    )


@dataclass(kw_only=True, slots=True)
class ExtraLossConfig:
    """An element of `loss_extra`: a user's own loss term and its coefficient."""

    name: str
    coef: float = 1.0


@dataclass(kw_only=True, slots=True)
class RouterReplayConfig:
    """Routing of a mixture of experts, held fixed between passes over the same tokens."""

    mode: str = setting(
        "disabled",
        (
            "R2: the update routes response tokens to the experts that the pass for old log-probs "
            "chose; R3: both route them to those of the rollout"
        ),
        choices=ROUTER_REPLAYS,
    )


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    strategy: str = setting(
        "fsdp", "how weights are sharded; fsdp and fsdp2 both mean FSDP2", choices=STRATEGIES
    )
    ppo_mini_batch_size: int | None = setting(
        None, "prompts an optimizer step; null: the whole batch", above=0
    )
    ppo_micro_batch_size: Any = alias("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None,
        "responses a forward-backward pass; null: as many as fit ppo_max_token_len_per_gpu",
        above=0,
    )
    use_dynamic_bsz: bool | None = setting(
        None, "micro-batches by tokens; null: unless their rows are given"
    )
    ppo_max_token_len_per_gpu: int | None = setting(
        None,
        "tokens a forward-backward pass; null: as many as fit the GPU, by measurement",
        above=0,
    )
    clip_ratio: float = setting(0.2, "epsilon of the policy ratio", at_least=0)
    clip_ratio_low: float = setting(0.2, "epsilon below 1", at_least=0, follows=".clip_ratio")
    clip_ratio_high: float = setting(0.2, "epsilon above 1", at_least=0, follows=".clip_ratio")
    clip_ratio_c: float = setting(
        3.0, "dual clip: bound of the ratio where the advantage is negative", above=1
    )
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    loss_extra: list[ExtraLossConfig] = setting(
        [], "registered extra loss terms, a list of {name, coef}"
    )
    loss_agg_mode: str = setting(
        "token-mean",
        "how token losses become one number; seq-mean-token-sum-norm: mean over responses of the "
        "sum over tokens / R (data.max_response_length), Dr.GRPO's",
        choices=LOSS_AGGREGATIONS,
    )
    entropy_coeff: float = setting(0.0, "weight of the entropy bonus", finite=True)
    use_kl_loss: bool = setting(False, "add KL to the reference to the loss")
    kl_loss_coef: float = setting(0.001, "weight of that KL", at_least=0, finite=True)
    kl_loss_type: str = setting(
        "low_var_kl",
        "estimator of that KL; with + it has the gradient of k2; full: exact, over the whole "
        "vocabulary (the reference's hidden states travel with the batch)",
        choices=KL_ESTIMATORS,
    )
    use_torch_compile: bool | None = setting(
        None, "torch.compile of the decoder layers; null: on CUDA"
    )
    share_prompts: bool = setting(
        True,
        (
            "actor and reference compute a prompt once for its responses in a micro-batch, where "
            "that saves 10 %"
        ),
    )
    ppo_epochs: int = setting(1, "passes over a batch", above=0)
    shuffle: bool = setting(False, "new order of rows in each pass over a batch")
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    grad_clip: float = setting(1.0, "largest L2 norm of the gradient", above=0)
    freeze_vision_tower: bool = setting(
        False, "models that read pictures: train all but the vision tower"
    )
    ulysses_sequence_parallel_size: int = setting(
        1, "ranks that share the tokens of a sequence", above=0
    )
    entropy_from_logits_with_chunking: bool = setting(
        False, "entropy in chunks", no_effect=_ALWAYS_CHUNKED, also=(True,)
    )
    entropy_checkpointing: bool = setting(
        False, "recompute entropy", no_effect=_ALWAYS_CHUNKED, also=(True,)
    )
    calculate_sum_pi_squared: bool = setting(
        False,
        "sum of squared probabilities at each token",
        no_effect="computed where the advantage estimator reads it",
        also=(True,),
    )
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)

    @property
    def needs_exact_kl(self) -> bool:
        """Return whether the loss compares whole distributions with the reference's."""
        return self.use_kl_loss and self.kl_loss_type == "full"
