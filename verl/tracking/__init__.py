"""Record the numbers and samples of a run."""

from verl.tracking.backends import TrackerBackend, TrackerSettings, tracker_backends
from verl.tracking.json_lines import WRITTEN_IN_STEP
from verl.tracking.samples import write_samples
from verl.tracking.tracker import Tracker

__all__ = [
    "WRITTEN_IN_STEP",
    "Tracker",
    "TrackerBackend",
    "TrackerSettings",
    "tracker_backends",
    "write_samples",
]
