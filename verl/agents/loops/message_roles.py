"""Warn of messages of an environment, or of their roles, that seem to be a mistake."""

import logging
from collections.abc import Sequence

from verl.agents.environments import Observation
from verl.data.chat import Message
from verl.data.roles import doubtful_role
from verl.utils.logging import say_once


def warn_of_roles(environment: str, seen: Observation, template: str, *, is_opening: bool) -> None:
    """Warn once of each role in an observation that the model would read as something else.

    Args:
        environment: its name in the configuration.
        template: the model's chat template.
        is_opening: whether the conversation begins with the observation. Then turns of the
            assistant are examples.
    """
    for message in seen.messages:
        role = message["role"]
        if role == "assistant" and not is_opening:
            say_once(
                f"The environment '{environment}' answers with a message of the role 'assistant'. "
                "The turn of the model is in the conversation already, so the model reads it "
                "twice if this is a copy. Let step return the new messages alone, not the whole "
                "conversation.",
                logging.WARNING,
            )

        meant = doubtful_role(role, template)
        if meant is not None:
            say_once(
                f"The environment '{environment}' returns a message with the role '{role}'; did "
                f"you mean '{meant}'? The chat template does not name it, so the model reads a "
                "role that it may not know.",
                logging.WARNING,
            )


def warn_of_repeats(environment: str, before: Sequence[Message], seen: Observation) -> None:
    """Warn once of an observation that begins with all messages of the one before it, and goes on.

    Args:
        environment: its name in the configuration.
        before: messages of the last observation for the same role.
    """
    is_longer = len(seen.messages) > len(before) > 0
    if is_longer and list(seen.messages[: len(before)]) == list(before):
        say_once(
            f"The environment '{environment}' answers with its earlier messages and new ones, so "
            "the model reads the earlier ones again in every turn. Let step return the new "
            "messages alone, not the whole conversation.",
            logging.WARNING,
        )
