"""The video part of a model's own processor: from frames to tensors and tokens.

transformers' processors of videos need torchvision, so the processor of images prepares the
frames. The vision tower reads several frames as one, where an image is such a group of one frame,
repeated.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import is_av_available, is_torchcodec_available
from transformers.video_utils import load_video

from verl.models.pictures import Frames, Picture
from verl.models.vision import FIRST_WITH_VIDEOS, family_of, knows_videos, video_times
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import DataError, MissingDependencyError


class VideoProcessor:
    """Prepares videos one by one. A prompt has one placeholder for each, the token `token_id`.

    Args:
        processor: of the model, with its processor of images.
        config: of a model whose family reads videos.
        source: folder of the model, or its name on the hub.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig, source: str) -> None:
        self.config = config
        self.family = family_of(config)
        self.images = processor.image_processor
        self.tokenizer = processor.tokenizer
        self.token: str = processor.video_token
        self.token_id: int = config.video_token_id  # pyright: ignore[reportAttributeAccessIssue]
        self._source = source
        self._begin = ""
        self._end = ""
        if self.family.splits_videos:
            self._begin = processor.vision_start_token
            self._end = processor.vision_end_token

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the model's settings of videos.

        Raises MissingDependencyError if this transformers does not read videos as it should.
        """
        if not knows_videos():
            raise MissingDependencyError(
                f"Videos need transformers {FIRST_WITH_VIDEOS} or newer, got "
                f"{transformers.__version__}. Install it: pip install -U transformers"
            )
        parts = importlib.import_module("transformers.video_processing_utils")
        settings, _ = parts.VideoProcessorMixin.get_video_processor_dict(self._source)
        return settings

    def prepare(self, frames: Frames, key: str) -> Picture:
        """Prepare one video. Raises DataError if its size is not supported."""
        try:
            pixels, rows, columns = self._pixels(frames)
        except (ValueError, ZeroDivisionError) as error:
            first = frames.images[0]
            raise DataError(
                f"the model's processor refuses a video of {len(frames.images)} frames of "
                f"{first.width} x {first.height} pixels: {error}"
            ) from error

        group = self.images.temporal_patch_size
        count = ceil_div(len(frames.images), group)
        merge = self.images.merge_size
        grid = (rows // merge, columns // merge)
        seconds = group / frames.fps
        return Picture(
            key=key,
            token_ids=tuple(self._token_ids(frames, count, grid[0] * grid[1])),
            token_id=self.token_id,
            # The vision tower reads patches of videos as it does those of images.
            inputs={
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([[count, rows, columns]]),
            },
            grid=grid,
            times=video_times(self.config, count, seconds),
            seconds=seconds,
        )

    def _pixels(self, frames: Frames) -> tuple[Tensor, int, int]:
        """Return the patches (n, d) of all groups of frames, and the rows and columns of one."""
        height, width = self._size(frames)
        resized = []
        for image in frames.images:
            resized.append(image.resize((width, height), self.images.resample))
        settings: dict[str, Any] = {}
        for name in ("image_mean", "image_std"):
            if self.settings.get(name) is not None:
                settings[name] = self.settings[name]
        output = self.images(images=resized, do_resize=False, return_tensors="pt", **settings)

        # (frames, patches, channels, group, pixels), with each frame at all places of its group
        group = self.images.temporal_patch_size
        _, rows, columns = output["image_grid_thw"][0].tolist()
        patches = output["pixel_values"].unflatten(0, (len(resized), -1))
        patches = patches.unflatten(2, (3, group, -1))
        missing = -len(resized) % group
        copies = patches[-1:].expand(missing, -1, -1, -1, -1)
        patches = torch.cat([patches, copies])
        joined = [patches[place::group, :, :, place] for place in range(group)]
        return torch.stack(joined, dim=3).flatten(2).flatten(0, 1), rows, columns

    def _size(self, frames: Frames) -> tuple[int, int]:
        """Return height and width of a resized frame."""
        first = frames.images[0]
        lowest, highest = self._pixel_limits()
        limits = {
            "factor": self.images.patch_size * self.images.merge_size,
            "min_pixels": lowest if frames.min_pixels is None else frames.min_pixels,
            "max_pixels": highest if frames.max_pixels is None else frames.max_pixels,
        }

        models = "transformers.models"
        if not self.family.splits_videos:
            parts = importlib.import_module(f"{models}.qwen2_vl.image_processing_pil_qwen2_vl")
            return parts.smart_resize(first.height, first.width, **limits)
        parts = importlib.import_module(f"{models}.qwen3_vl.video_processing_qwen3_vl")

        group = self.images.temporal_patch_size
        return parts.smart_resize(
            len(frames.images), first.height, first.width, temporal_factor=group, **limits
        )

    def _pixel_limits(self) -> tuple[int, int]:
        assert self.family.video_pixels is not None
        size = self.settings.get("size") or {}
        lowest = size.get("shortest_edge", self.family.video_pixels[0])
        highest = size.get("longest_edge", self.family.video_pixels[1])
        if not self.family.splits_videos:
            lowest = self.settings.get("min_pixels") or lowest
            highest = self.settings.get("max_pixels") or highest
        return lowest, highest

    def _token_ids(self, frames: Frames, count: int, tokens: int) -> list[int]:
        """Return the ids of a video of `count` groups of frames with `tokens` tokens each."""
        if not self.family.splits_videos:
            return [self.token_id] * (count * tokens)
        group = self.images.temporal_patch_size
        text = ""
        for number in range(count):
            times = frames.times[number * group : (number + 1) * group]
            text += f"<{(times[0] + times[-1]) / 2:.1f} seconds>"
            text += self._begin + self.token * tokens + self._end
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @staticmethod
    def decode(
        path: Path, choose: Callable[[int, float], Sequence[int]]
    ) -> tuple[np.ndarray, list[int], int, float]:
        """Read frames of a video file by transformers' own readers, which need a further package.

        Returns RGB frames (T, H, W, 3), their numbers, and of the file the number of frames and the
        frames a second. Raises DataError for a file that cannot be read, and if there is no such
        package.

        Args:
            path: of the file.
            choose: gives the numbers of the frames to read, from the latter two.
        """
        # torchcodec also needs libraries of the system, which may be missing.
        backend = "pyav" if is_av_available() else "torchcodec"
        if backend == "torchcodec" and not is_torchcodec_available():
            raise DataError(
                f"the video '{path}' cannot be decoded, because neither torchcodec nor av is "
                "installed. Install one (pip install av), or give the video as a list of frames"
            )

        def choose_frames(metadata: Any, **_: Any) -> list[int]:
            if not metadata.total_num_frames or not metadata.fps:
                raise ValueError("it does not say how many frames it has")
            return list(choose(metadata.total_num_frames, float(metadata.fps)))

        file: Any = str(path)
        try:
            video, metadata = load_video(file, backend=backend, sample_indices_fn=choose_frames)
        except (ValueError, OSError, RuntimeError, IndexError) as error:
            raise DataError(
                f"the video '{path}' is damaged or not complete ({error}). Copy it again, or leave "
                "the row out"
            ) from error
        about: Any = metadata
        return np.asarray(video), about.frames_indices, about.total_num_frames, float(about.fps)
