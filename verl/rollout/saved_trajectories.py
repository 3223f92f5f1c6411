"""Segments and trajectories in plain values, as the checkpoints of asynchronous runs have them.

Pictures are saved apart, once each; a trajectory has their keys.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from verl.models.pictures import Picture
from verl.rollout.trajectory import MODEL, Segment, Trajectory

# version, token ids (int64) and log-probs (float32)
PackedSegment = tuple[int, np.ndarray, np.ndarray]


def packed_segments(segments: Iterable[Segment]) -> list[PackedSegment]:
    """Return version, token ids and log-probs of each segment that a model has drawn."""
    packed = []
    for segment in segments:
        token_ids = np.asarray(segment.token_ids, np.int64)
        packed.append((segment.version, token_ids, np.asarray(segment.log_probs, np.float32)))
    return packed


def unpacked_segments(packed: Iterable[PackedSegment]) -> list[Segment]:
    """Undo `packed_segments`."""
    segments = []
    for version, token_ids, log_probs in packed:
        segments.append(
            Segment(
                source=MODEL,
                token_ids=token_ids.tolist(),
                log_probs=log_probs.tolist(),
                version=version,
            )
        )
    return segments


def packed_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory with its segments in plain values, and the keys of its pictures."""
    values = _fields(trajectory)
    values["pictures"] = [picture.key for picture in trajectory.pictures]
    values["prompt_ids"] = list(trajectory.prompt_ids)
    values["segments"] = [_fields(segment) for segment in trajectory.segments]
    return values


def unpacked_trajectory(values: Mapping[str, Any], pictures: Mapping[str, Picture]) -> Trajectory:
    """Undo `packed_trajectory`."""
    segments = [Segment(**segment) for segment in values["segments"]]
    own = tuple(pictures[key] for key in values["pictures"])
    return Trajectory(**{**values, "segments": segments, "pictures": own})


def _fields(record: Segment | Trajectory) -> dict[str, Any]:
    """Return the fields of a record; nested ones stay as they are."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
