"""The picture part of a model's own processor: from an image to tensors and tokens."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import (
    AutoImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)

from verl.models.load import load_model_config, resolve_path
from verl.models.pictures import Picture
from verl.models.videos import VideoProcessor
from verl.models.vision import family_of, knows_videos, reads_pictures
from verl.utils.errors import DataError, ModelError, causes
from verl.utils.imports import require

# Outputs of a processor that are not read by the vision tower.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
_COPIED_FILES = (*_SETTINGS_FILES, "video_preprocessor_config.json", "chat_template.json")


class PictureProcessor:
    """Prepares pictures one by one, by the model's own processor.

    A prompt has one placeholder for each picture, the token `placeholder_id`; `Picture.token_ids`
    replace it. Most families use `token_id` itself, Gemma 3 the token that begins an image.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig, source: str) -> None:
        """Take a processor of transformers.

        Args:
            processor: of the model, with its processor of images.
            config: of the model.
            source: folder of the model, or its name on the hub.
        """
        self.processor = processor
        self.family = family_of(config)
        if self.family.three_parts:
            _check_patches(processor.image_processor, config, source)
        self.token_id: int = config.image_token_id  # pyright: ignore[reportAttributeAccessIssue]
        self.placeholder: str = processor.image_token
        self.placeholder_id: int = processor.tokenizer.convert_tokens_to_ids(self.placeholder)
        settings = json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str)
        self.videos: VideoProcessor | None = None
        if self.family.video_pixels is not None:
            self.videos = VideoProcessor(processor, config, source)
            if knows_videos():
                settings += json.dumps(self.videos.settings, sort_keys=True, default=str)
        text = f"{type(processor).__name__} {settings} {self.token_id}"
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def prepare(self, image: Any, key: str) -> Picture:
        """Prepare one RGB image of PIL. Raises DataError if the processor refuses it."""
        try:
            output = self.processor(
                text=[self.placeholder],
                images=[image],
                add_special_tokens=False,
                return_tensors="pt",
            )
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise DataError(
                f"the model's processor refuses a picture of {image.width} x {image.height} "
                f"pixels: {error}"
            ) from error

        ids = tuple(output["input_ids"][0].tolist())
        inputs: dict[str, torch.Tensor] = {}
        for name, value in output.items():
            if name not in _OF_TEXT:
                inputs[name] = torch.as_tensor(value)

        grid = None
        if self.family.three_parts:
            merge = self.processor.image_processor.merge_size
            _, rows, columns = inputs["image_grid_thw"][0].tolist()
            grid = (rows // merge, columns // merge)
        return Picture(
            key=key,
            token_ids=ids,
            token_id=self.token_id,
            inputs=inputs,
            grid=grid,
            sees_itself=self.family.sees_itself,
        )


def _check_patches(images: Any, config: Any, source: str) -> None:
    """Raise ModelError for a processor of images whose patches are not those of the model."""
    vision = config.vision_config
    expected = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    for name, value in expected.items():
        found = getattr(images, name, None)
        if found != value:
            raise ModelError(
                f"The processor of pictures in '{source}' does not belong to the model: its {name} "
                f"must be {value}, got {found}. Copy {' or '.join(_SETTINGS_FILES)} of the model "
                "there."
            )


def load_picture_processor(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> PictureProcessor | None:
    """Load the processor of a model; None if the model reads text alone.

    A tokenizer without a chat template gets the processor's. Needs pillow; the faster torchvision
    is used where it is installed.
    """
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    if not reads_pictures(config):
        return None
    require("PIL.Image", "Reading pictures", "pip install 'verl[vision]'")
    source = resolve_path(path)
    if tokenizer.convert_ids_to_tokens(config.image_token_id) is None:  # pyright: ignore
        raise ModelError(
            f"The model in '{source}' reads pictures at token {config.image_token_id}, which its "  # pyright: ignore
            "tokenizer does not have. Use the tokenizer that belongs to the model."
        )

    try:
        images = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        kind: Any = processor_class_from_name(str(PROCESSOR_MAPPING_NAMES[config.model_type]))
        settings = _settings(kind, source)
        processor = _of_images_alone(kind)(image_processor=images, tokenizer=tokenizer, **settings)
    except ImportError as error:
        # transformers names a class of its own, which may have failed for want of another package
        *_, root = causes(error)
        reason = f"{error}" if root is error else f"{error} The cause: {root}"
        raise ModelError(
            f"Cannot load the processor of pictures from '{source}': {reason}"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"Cannot load the processor of pictures from '{source}': {error}. Copy "
            f"{' or '.join(_SETTINGS_FILES)} of the model there."
        ) from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    return PictureProcessor(processor, config, source)


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copy the processor of a model that reads pictures, from where the model was loaded."""
    if not reads_pictures(model.config):
        return
    source = str(model.name_or_path)
    for name in _COPIED_FILES:
        file = Path(source) / name
        if not Path(source).is_dir():
            cached = try_to_load_from_cache(source, name)
            file = Path(cached) if isinstance(cached, str) else file
        if file.is_file():
            shutil.copyfile(file, folder / name)


def _of_images_alone(kind: Any) -> Any:
    """Derive a processor that does without a processor of videos, which would need torchvision."""

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

        def __reduce__(self) -> Any:
            return _without_parts, (kind,), self.__dict__

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos


def _without_parts(kind: Any) -> Any:
    """Return a processor of images alone that unpickling fills."""
    derived = _of_images_alone(kind)
    return derived.__new__(derived)


def _settings(kind: Any, source: str) -> dict[str, Any]:
    """Return the arguments of a processor class, in addition to its parts."""
    settings: dict[str, Any] = {}
    parts = kind.get_attributes()
    values, _ = kind.get_processor_dict(source) if _has_settings(source) else ({}, {})
    for name, value in values.items():
        if name not in ("processor_class", "auto_map", *parts):
            settings[name] = value
    if "video_processor" in parts:
        settings["video_processor"] = None
    return settings


def _has_settings(source: str) -> bool:
    folder = Path(source)
    if not folder.is_dir():
        return True
    files = ("processor_config.json", "chat_template.json", "chat_template.jinja")
    return any((folder / name).is_file() for name in files)
