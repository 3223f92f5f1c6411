"""The prompts."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.choices import TRUNCATIONS
from verl.config.setting import alias, setting

_IN_MEMORY = "the latest prepared images always stay in memory"


@dataclass(kw_only=True, slots=True)
class CustomClassConfig:
    path: str | None = setting(None, "file of your own dataset class", is_path=True)
    name: str | None = setting(None, "name of your own dataset class")


@dataclass(kw_only=True, slots=True)
class SamplerConfig:
    class_path: str | None = setting(None, "file of your own (curriculum) sampler", is_path=True)
    class_name: str | None = setting(None, "name of your own (curriculum) sampler")


@dataclass(kw_only=True, slots=True)
class DataGenConfig:
    path: str | None = setting(
        None, "file of a data generator", planned="data cannot be generated during training yet"
    )
    name: str | None = setting(
        None, "name of a data generator", no_effect="read together with data.datagen.path only"
    )


@dataclass(kw_only=True, slots=True)
class PromptsConfig:
    """How prompts are read, in any program."""

    tokenizer: str | None = setting(
        None, "folder or hub name of a tokenizer; null: the model's", is_path=True
    )
    prompt_key: str = setting("prompt", "column that holds the messages")
    truncation: str = setting(
        "error",
        "treatment of a longer prompt; left and right name the side cut off",
        choices=TRUNCATIONS,
    )
    trust_remote_code: bool = setting(
        False, "run Python code that comes with a tokenizer (model.trust_remote_code does too)"
    )


@dataclass(kw_only=True, slots=True)
class TrainingDataConfig(PromptsConfig):
    """The rows of any training run."""

    train_files: Any = setting(
        None, "file or list of files: Parquet, JSON lines, folder", many=True, is_path=True
    )
    val_files: Any = setting(
        None, "files to validate on; null: no validation", many=True, is_path=True
    )
    use_shm: bool = setting(False, "copy files to /dev/shm first", no_effect="files are read once")
    train_batch_size: int = setting(
        1024,
        "prompts a step; 0 with trainer.mode=fully_async: async_training.require_batches x "
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        above=0,
    )
    val_batch_size: int | None = setting(
        None, "prompts a validation batch; null: all at once", above=0
    )
    train_max_samples: int = setting(
        -1,
        "train on so many rows: the first ones, or drawn by data.seed where data.shuffle is true; "
        "-1: all",
        at_least=-1,
    )
    shuffle: bool = setting(True, "new order of the training rows each epoch")
    seed: int = setting(0, "seed of the order of rows", at_least=0, follows="trainer.seed")
    apply_chat_template_kwargs: dict[str, Any] = setting(
        {}, "variables that the chat template gets, such as enable_thinking: false"
    )
    image_key: str = setting(
        "images",
        (
            "column of images: paths, bytes, {bytes, path} or PIL; <image> in a message stands for "
            "the next one; an error with a model that reads text alone"
        ),
    )
    video_key: str = setting(
        "videos",
        (
            "column of videos: lists of frames, paths, or dicts with fps and limits; <video> in a "
            "message stands for the next one; an error with a model that does not read videos"
        ),
    )
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)


@dataclass(kw_only=True, slots=True)
class DataConfig(TrainingDataConfig):
    dataset_name: str | None = setting(
        None,
        (
            "'toy' (ten packaged prompts, with defaults of its own), 'calculator' (packaged "
            "products that need a tool), or a file or `save_to_disk` folder"
        ),
        is_path=True,
    )
    reward_fn_key: str = setting("data_source", "column that picks the reward rule")
    max_prompt_length: int = setting(512, "P: longest prompt, in tokens", above=0)
    max_response_length: int = setting(512, "R: longest response, in tokens", above=0)
    gen_batch_size: int | None = setting(
        None,
        "prompts of a round of DAPO",
        no_effect="rounds of train_batch_size prompts follow until enough of them are kept",
    )
    val_max_samples: int = setting(
        -1,
        "validate on so many rows: the first ones, or drawn by data.seed where "
        "data.validation_shuffle is true; -1: all",
        at_least=-1,
    )
    return_raw_input_ids: bool = setting(
        False, "keep raw_prompt_ids", no_effect="every batch carries raw_prompt_ids", also=(True,)
    )
    return_raw_chat: bool = setting(
        False, "keep raw_prompt", no_effect="every batch carries raw_prompt", also=(True,)
    )
    return_full_prompt: bool = setting(
        False,
        "keep the prompt's rendered text",
        no_effect="batches carry the messages and the token ids instead",
    )
    validation_shuffle: bool = setting(False, "shuffle the validation rows")
    dataloader_num_workers: int = setting(
        0,
        "processes that read the training rows and prepare their pictures, one batch ahead (none "
        "ahead with data.sampler). Together they keep 1 GiB of prepared pictures, and the driver "
        "another, in which equal images are one tensor. 0: threads of the driver, which always "
        "read for validation and generation",
        at_least=0,
    )
    filter_overlong_prompts: bool = setting(False, "drop prompts longer than max_prompt_length")
    filter_overlong_prompts_workers: int = setting(
        1, "processes that measure prompts", no_effect="lengths are measured once and cached"
    )
    custom_chat_template: Any = alias(
        "actor_rollout_ref.model.custom_chat_template", "Jinja chat template"
    )
    tool_config_path: str | None = setting(
        None,
        "tools that prompts are measured with",
        no_effect="prompts are measured with those of actor_rollout_ref.rollout.multi_turn",
    )
    need_tools_kwargs: bool = setting(
        False,
        "warn of rows without tools_kwargs",
        no_effect="a row says it itself, by extra_info.need_tools_kwargs",
    )
    return_multi_modal_inputs: bool = setting(True, "keep processed images", no_effect=_IN_MEMORY)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    datagen: DataGenConfig = field(default_factory=DataGenConfig)
