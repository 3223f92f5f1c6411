"""The class that a user derives for a simulated user, as in verl 0.5."""

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """A simulated user. One object serves all conversations of a run; an id distinguishes them.

    Methods may be coroutines or plain functions. Coroutines share one event loop; each plain call
    gets a thread. Either way, code that blocks does not delay the rollout.

    Args:
        config: settings of the YAML entry, with its `name`. `timeout_s` in it limits each call.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation and return its id.

        Args:
            instance_id: id of the conversation; None makes one.
            kwargs: `interaction_kwargs` of the row.
        """
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the last message of the model. Derived classes must override this method.

        Args:
            instance_id: id of the conversation.
            messages: the conversation so far, as {"role", "content"}.
            kwargs: `interaction_kwargs` of the row.

        Returns:
            Whether the conversation ends, the user's answer, the score of the model's turn, and
            additional data.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must override generate_response(instance_id, messages, "
            "**kwargs) and return (should_terminate, content, score, data)."
        )

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of a conversation, for `generate_response` to use."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End a conversation and free its state. Called once for every conversation that started,
        also after an error."""
