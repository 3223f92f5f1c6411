"""Warn of roles that an environment's messages seem to have by mistake."""

import logging

from verl.agents.environments import Observation
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
