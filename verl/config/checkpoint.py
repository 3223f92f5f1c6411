"""The contents of the checkpoint of one role."""

from dataclasses import dataclass

from verl.config.setting import setting

_DEFAULT = ["model", "optimizer", "extra"]
CHECKPOINT_PARTS = (*_DEFAULT, "hf_model")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    save_contents: list[str] = setting(
        _DEFAULT,
        (
            "written: model (always), optimizer, extra (schedule), hf_model (weights that "
            "transformers loads)"
        ),
    )
    load_contents: list[str] = setting(
        _DEFAULT, "read on resume: model (always), optimizer, extra", follows=".save_contents"
    )
