"""Profiling of single steps."""

from dataclasses import dataclass

from verl.config.setting import setting

_UNREAD = "the timeline of trainer.profile_steps is one file a step and has all ranks"


@dataclass(kw_only=True, slots=True)
class ProfilerConfig:
    discrete: bool = setting(
        False, "one trace per phase instead of one per step", no_effect=_UNREAD
    )
    all_ranks: bool = setting(False, "profile every rank", no_effect=_UNREAD)
    ranks: list[int] = setting([], "ranks to profile", no_effect=_UNREAD)
