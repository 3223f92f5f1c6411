"""From rewards to advantages."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.choices import KL_ESTIMATORS
from verl.config.setting import setting


@dataclass(kw_only=True, slots=True)
class KLControlConfig:
    type: str = setting("fixed", "how the coefficient moves", choices=("fixed", "adaptive"))
    kl_coef: float = setting(
        0.001, "(first) coefficient of the KL in the reward", at_least=0, finite=True
    )
    horizon: int = setting(10000, "adaptive: samples over which the coefficient adapts", above=0)
    target_kl: float = setting(0.1, "adaptive: KL aimed at", above=0)


@dataclass(kw_only=True, slots=True)
class PFPPOConfig:
    reweight_method: str = setting(
        "pow",
        (
            "how samples are drawn: by abs(score) ** weight_pow, the extremes alone, or the best "
            "more often"
        ),
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = setting(2.0, "power of the weights", at_least=0)


# verl's presets of the correction, by name: the keys that they set.
CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "decoupled_seq_is": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "decoupled_seq_is_rs": {
        **{"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        **{"rollout_rs": "sequence", "rollout_rs_threshold": "0.5_2.0"},
    },
    "decoupled_geo_rs": {"rollout_rs": "geometric", "rollout_rs_threshold": "0.999_1.001"},
    "decoupled_geo_rs_token_tis": {
        **{"rollout_is": "token", "rollout_is_threshold": 2.0},
        **{"rollout_rs": "geometric", "rollout_rs_threshold": "0.999_1.001"},
    },
    "decoupled_k3_rs": {"rollout_rs": "k3", "rollout_rs_threshold": 0.01},
    "decoupled_k3_rs_token_tis": {
        **{"rollout_is": "token", "rollout_is_threshold": 2.0},
        **{"rollout_rs": "k3", "rollout_rs_threshold": 0.01},
    },
    "bypass_ppo_clip": {"bypass_mode": True},
    "bypass_pg_is": {
        **{"bypass_mode": True, "loss_type": "reinforce"},
        **{"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    },
}


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig:
    """Correction for rollout probabilities that differ from the trainer's.

    rho = trainer / rollout.
    """

    rollout_is: str | None = setting(
        None,
        "importance weight of the policy loss: token (TIS, IcePop) or sequence; null: none",
        choices=("token", "sequence"),
    )
    rollout_is_threshold: float = setting(
        2.0,
        "largest weight; or smallest and largest, 0.5_2.0",
        above=0,
    )
    rollout_is_threshold_lower: float | None = setting(
        None,
        "smallest weight; null: 0, or with rollout_is_mode=mask the inverse of the largest",
        at_least=0,
    )
    preset: str | None = setting(
        None,
        "sets the other keys of this section that are unset, as verl's presets of these names do",
        choices=tuple(CORRECTION_PRESETS),
    )
    rollout_is_batch_normalize: bool = setting(
        False, "divide the weights by their mean over the batch"
    )
    proximal: str = setting(
        "recompute",
        (
            "old log-probs of the decoupled objective: by a pass (recompute), or with "
            "trainer.mode=fully_async between those of the rollout and the current ones, by the "
            "token's age (loglinear)"
        ),
        choices=("recompute", "loglinear"),
    )
    rollout_is_mode: str = setting(
        "truncate",
        "weights outside the bounds become the bound (TIS), or 0 (mask: IcePop)",
        choices=("truncate", "mask"),
    )
    rollout_rs: str | None = setting(
        None,
        (
            "rejection: of tokens (token), or of responses by the product (sequence) or the mean "
            "(geometric) of rho, or by the mean KL (k3)"
        ),
        choices=("token", "sequence", "geometric", "k3"),
    )
    rollout_rs_threshold: float = setting(
        2.0, "largest ratio that is accepted; or both bounds, 0.5_2.0", above=0
    )
    rollout_rs_threshold_lower: float | None = setting(
        None, "smallest ratio that is accepted; null: the inverse of the largest", at_least=0
    )
    rollout_token_veto_threshold: float | None = setting(
        None, "responses with a token of lower rho are rejected; null: none", at_least=0
    )
    bypass_mode: bool = setting(
        False,
        (
            "old log-probs are the rollout's own: the policy loss corrects (loss_type), and no "
            "pass recomputes them"
        ),
    )
    loss_type: str = setting(
        "ppo_clip",
        (
            "with bypass_mode: the ratio of actor.policy_loss corrects (ppo_clip), or the policy "
            "gradient -w A log pi, with w = current policy / rollout by rollout_is (reinforce)"
        ),
        choices=("ppo_clip", "reinforce"),
    )

    @property
    def changes_update(self) -> bool:
        """Return whether the update weighs or rejects by the trainer's own old log-probs."""
        asked = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold)
        recomputes = not self.bypass_mode and self.proximal == "recompute"
        return recomputes and asked != (None, None, None)

    @property
    def needs_no_pass(self) -> bool:
        """Return whether old log-probs follow from the rollout's own."""
        return self.bypass_mode or self.proximal == "loglinear"

    @property
    def weight_band(self) -> tuple[float, float]:
        """Return the smallest and the largest weight."""
        lower = self.rollout_is_threshold_lower
        if lower is None:
            lower = 1 / self.rollout_is_threshold if self.rollout_is_mode == "mask" else 0.0
        return lower, self.rollout_is_threshold

    @property
    def accept_band(self) -> tuple[float, float]:
        """Return the smallest and the largest ratio that is accepted."""
        lower = self.rollout_rs_threshold_lower
        if self.rollout_rs == "k3":
            lower = 0.0
        if lower is None:
            lower = 1 / self.rollout_rs_threshold
        return lower, self.rollout_rs_threshold


# Values of `filter_groups.metric` that name the score itself. The last two are those of verl; a KL
# penalty in the reward would tell them apart.
SCORE_METRICS = ("score", "seq_reward", "seq_final_reward")


@dataclass(kw_only=True, slots=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling."""

    enable: bool = setting(
        False, "draw further prompts until train_batch_size of them have responses that differ"
    )
    metric: str = setting(
        "score",
        "the field that must differ: score, or a field that the reward returns, such as acc",
    )
    max_num_gen_batches: int = setting(
        10, "batches of prompts a step may take; 0: any number", at_least=0
    )
    on_exhausted: str = setting(
        "error",
        "when these are used up: stop, or fill the batch with prompts of equal responses",
        choices=("error", "fill"),
    )


@dataclass(kw_only=True, slots=True)
class EntropyControlConfig:
    type: str = setting(
        "fixed",
        "fixed: actor.entropy_coeff; adaptive: moved towards target_entropy",
        choices=("fixed", "adaptive"),
    )
    target_entropy: float = setting(0.2, "adaptive: entropy aimed at, in nats a token", at_least=0)
    delta: float = setting(0.005, "adaptive: how far the coefficient moves a step", above=0)


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    adv_estimator: str = setting(
        "gae", "registered advantage estimator: gae (PPO, with a critic), grpo, ..."
    )
    adv_kwargs: dict[str, Any] = setting(
        {}, "further keyword arguments of an advantage estimator of your own"
    )
    gamma: float = setting(1.0, "discount", at_least=0, at_most=1)
    lam: float = setting(1.0, "lambda of generalised advantage estimation", at_least=0, at_most=1)
    norm_adv_by_std_in_grpo: bool = setting(
        True, "divide by the group's standard deviation; False is Dr.GRPO"
    )
    use_kl_in_reward: bool = setting(
        False, "subtract KL to the reference from the reward of each token"
    )
    kl_penalty: str = setting("kl", "estimator of that KL", choices=KL_ESTIMATORS)
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = setting(
        False, "draw the samples of an update anew, by their reward (PF-PPO)"
    )
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
    turn_rewards: bool = setting(
        False,
        "rewards of single turns (tools, interactions, environments) count, each on the last token "
        "of its turn",
    )
    gdpo_reward_keys: list[str] = setting(
        [],
        (
            "gdpo: fields of the reward that are normalised apart, score among them; empty: the "
            "score alone"
        ),
    )
    gdpo_reward_weights: list[float] = setting([], "gdpo: weights of these fields; empty: 1 each")
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    entropy_ctrl: EntropyControlConfig = field(default_factory=EntropyControlConfig)
