"""Profiling of single steps."""

from dataclasses import dataclass

from verl.config.setting import setting

_UNREAD = "read together with trainer.profile_steps only, which is not available in this version"


@dataclass(kw_only=True, slots=True)
class ProfilerConfig:
    discrete: bool = setting(False, "one trace per phase instead of one per step", no_effect=_UNREAD)
    all_ranks: bool = setting(False, "profile every rank", no_effect=_UNREAD)
    ranks: list[int] = setting([], "ranks to profile", no_effect=_UNREAD)
