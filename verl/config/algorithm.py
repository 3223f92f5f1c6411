"""From rewards to advantages."""

from dataclasses import dataclass, field

from verl.config.choices import KL_ESTIMATORS
from verl.config.setting import setting

_PF_PPO = "read with algorithm.use_pf_ppo=True only, which is not available in this version"


@dataclass(kw_only=True, slots=True)
class KLControlConfig:
    type: str = setting("fixed", "how the coefficient moves", choices=("fixed", "adaptive"))
    kl_coef: float = setting(0.001, "(first) coefficient of the KL in the reward", at_least=0)
    horizon: int = setting(10000, "adaptive: samples over which the coefficient adapts", above=0)
    target_kl: float = setting(0.1, "adaptive: KL aimed at", above=0)


@dataclass(kw_only=True, slots=True)
class PFPPOConfig:
    reweight_method: str = setting("pow", "how samples are weighted", no_effect=_PF_PPO)
    weight_pow: float = setting(2.0, "power of the weights", no_effect=_PF_PPO)


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    adv_estimator: str = setting("gae", "registered advantage estimator: gae (PPO, with a critic), grpo, ...")
    gamma: float = setting(1.0, "discount", at_least=0, at_most=1)
    lam: float = setting(1.0, "lambda of generalised advantage estimation", at_least=0, at_most=1)
    norm_adv_by_std_in_grpo: bool = setting(True, "divide by the group's standard deviation; False is Dr.GRPO")
    use_kl_in_reward: bool = setting(False, "subtract KL to the reference from the reward of each token")
    kl_penalty: str = setting("kl", "estimator of that KL", choices=KL_ESTIMATORS)
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = setting(False, "re-weight samples by reward", planned="PF-PPO is not built yet")
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
