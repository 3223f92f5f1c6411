"""What a checkpoint of one role holds."""

from dataclasses import dataclass

from verl.config.setting import setting

_ALWAYS = (
    "a checkpoint always holds Hugging Face weights (with LoRA adapters, and merged weights where hf_model is among "
    "these), optimizer, schedule and random state"
)
_ALL = ["model", "optimizer", "extra"]
_ALSO = ([*_ALL, "hf_model"], ["hf_model", *_ALL], ["model", "hf_model", "optimizer", "extra"])


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    save_contents: list[str] = setting(_ALL, "parts that are written", no_effect=_ALWAYS, also=_ALSO)
    load_contents: list[str] = setting(
        _ALL, "parts that are read on resume", no_effect=_ALWAYS, also=_ALSO, follows=".save_contents"
    )
