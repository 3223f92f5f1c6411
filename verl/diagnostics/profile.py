"""`verl.utils.profile_memory`: predict the memory of a run, and compare it with measured peaks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from verl.config import TrainConfig
from verl.config.keywords import config_from_keywords
from verl.config.sft import SFTConfig
from verl.diagnostics.advice import Advice, advise
from verl.diagnostics.memory_plan import plan_memory
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.parts import check_names, load_user_code
from verl.diagnostics.phase_plan import MemoryPlan
from verl.diagnostics.report import as_json, render
from verl.diagnostics.sft_plan import advise_fine_tuning, plan_fine_tuning
from verl.utils.errors import ConfigError
from verl.utils.peaks import Peak, phase_peaks

# Phases of a plan, and the names under which engines and workers report their peaks.
_REPORTED_AS = {
    "actor, rollout": "generation",
    "reward_model, scores": "the reward model",
    "actor, old log-probs": "the pass for old log-probs",
    "actor, reference log-probs": "the pass for reference log-probs",
    "reference, reference log-probs": "the pass for reference log-probs",
    "teacher, teacher log-probs": "the teacher's pass",
    "critic, values": "the pass for values",
    "critic, critic update": "the critic's update",
    "actor, actor update": "the actor's update",
    "actor, weights to the rollout": "the hand-over of weights to the rollout",
    "actor, checkpoint": "a checkpoint",
    "critic, checkpoint": "a checkpoint",
}


# The run in this process, if any, and the bytes of the process before it loaded a model.
_running: list[tuple[TrainConfig, int]] = []


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """A plan with its verdict; `print` it."""

    plan: MemoryPlan
    advice: list[Advice] = field(default_factory=list)
    measured: dict[str, Peak] | None = None  # peaks of this process so far, by role and phase

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits on a device; None where its size is not known."""
        return self.plan.fits

    def __str__(self) -> str:
        return render(self.plan, self.advice, self.measured)

    def to_json(self, **others: Mapping[str, Any]) -> str:
        """Return everything for programs, and `others` next to it."""
        return as_json(self.plan, self.advice, self.measured, **others)


def watch(config: TrainConfig) -> None:
    """Remember the configuration of the run in this process, for `profile_memory()`.

    Call it before the models load: a plan counts no libraries, so measured memory of the host
    counts from here.
    """
    _running[:] = [(config, psutil.Process().memory_info().rss)]


def profile_memory(config: Any = None, *, device_gib: float | str | None = None) -> MemoryProfile:
    """Plan the memory of a configuration, in seconds and without a weight or a GPU; `print` the
    result.

    Args:
        config: a TrainConfig or SFTConfig, a mapping of keys to values, or the path of a YAML file.
            None is the configuration of the trainer in this process, with its measured peaks.
        device_gib: of one device, or the name of a card ("H100", "A100-40", "L40S"); None: of the
            visible one.

    Raises:
        ConfigError: no trainer runs here; the card is unknown; ranks and rows do not divide; a part
            is not registered.
        ModelError: a model is missing.
    """
    measured = None
    if config is None:
        if not _running:
            raise ConfigError(
                "profile_memory() without a configuration describes the trainer in this process, "
                "and none is running. "
                'Give it a configuration: profile_memory({"data.dataset_name": "toy"}).'
            )
        config, host_before = _running[0]
        measured = measured_phases(host_before)
    elif not isinstance(config, (TrainConfig, SFTConfig)):
        config = config_from_keywords(config, {})

    shapes = ModelShapes()
    if isinstance(config, SFTConfig):
        plan = plan_fine_tuning(config, device_gib, shapes)
        return MemoryProfile(plan=plan, advice=advise_fine_tuning(config, plan, shapes))
    if measured is None:
        load_user_code(config)
        check_names(config)
    plan = plan_memory(config, device_gib, shapes)
    return MemoryProfile(plan=plan, advice=advise(config, plan, shapes), measured=measured)


def measured_phases(host_before: int) -> dict[str, Peak]:
    """Return the peaks of this process so far, by the names of a plan's phases.

    Those of the host are its growth since the process had `host_before` bytes.
    """
    found = {}
    for name, reported in _REPORTED_AS.items():
        if reported in phase_peaks.phases:
            peak = phase_peaks.phases[reported]
            found[name] = peak._replace(host=max(0, peak.host - host_before))
    return found
