"""Simulated users that answer a model between its turns. Public names load on first use."""

from typing import TYPE_CHECKING

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.agents.interactions.base import BaseInteraction
    from verl.agents.interactions.gsm8k import Gsm8kInteraction
    from verl.agents.interactions.registry import (
        initialize_interactions_from_config,
    )
    from verl.agents.interactions.session import InteractionSession, InteractionSet

__all__ = [
    "BaseInteraction",
    "Gsm8kInteraction",
    "InteractionSession",
    "InteractionSet",
    "initialize_interactions_from_config",
]


__getattr__ = lazy_names(
    __name__,
    {
        "BaseInteraction": "verl.agents.interactions.base",
        "Gsm8kInteraction": "verl.agents.interactions.gsm8k",
        "InteractionSession": "verl.agents.interactions.session",
        "InteractionSet": "verl.agents.interactions.session",
        "initialize_interactions_from_config": "verl.agents.interactions.registry",
    },
)
