"""Names that a key may take, where the set is closed, and limits that several keys share."""

STRATEGIES = ("fsdp", "fsdp2")
ROUTER_REPLAYS = ("disabled", "R2", "R3")
LOSS_AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
# Packaged advantage estimators and policy losses; users register others.
ESTIMATORS = (
    *("gae", "grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "turn_rloo", "remax"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline"),
)
POLICY_LOSSES = (
    *("vanilla", "gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean"),
    *("dppo", "dppo_tv", "dppo_kl", "dro"),
)
SEQUENCE_LOSSES = ("gspo", "geo_mean")  # of one ratio a response, written for seq-mean-token-mean
DTYPES = ("float32", "bfloat16", "float64")  # of models that are trained or frozen
ENGINE_DTYPES = ("float32", "bfloat16", "float16", "float64")
TRUNCATIONS = ("error", "left", "right", "middle")
ATTENTION_KERNELS = ("auto", "flash4", "cudnn", "torch")
OPTIMIZERS = ("AdamW", "AdamW8bit", "Muon")
SCHEDULES = ("constant", "cosine", "wsd")
KL_ESTIMATORS = (
    *("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    *("kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"),
    "full",
)
# Over the whole vocabulary, by `verl.algorithms.divergences`.
EXACT_DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
DISTILLATION_LOSSES = (*EXACT_DIVERGENCES, *(kind for kind in KL_ESTIMATORS if kind != "full"))
TRACKERS = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab")
MAX_LORA_RANK = 65_536  # wider than any layer
