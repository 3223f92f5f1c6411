"""A user who says whether an answer to a GSM8K question is right."""

from typing import Any
from uuid import uuid4

from verl.agents.interactions.base import BaseInteraction
from verl.rewards.builtin import gsm8k

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Scores the last turn of the model by the strict GSM8K rule, and ends after a right one.

    Rows carry `interaction_kwargs: {name: gsm8k, ground_truth: "72"}`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._conversations: dict[str, dict[str, str]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Remember the right answer. ValueError for a row without `ground_truth`."""
        if ground_truth is None:
            raise ValueError(
                "Gsm8kInteraction needs interaction_kwargs.ground_truth in every row, found none."
            )
        if instance_id is None:
            instance_id = str(uuid4())
        self._conversations[instance_id] = {"response": "", "ground_truth": str(ground_truth)}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return the verdict on the last message of the model."""
        answers = [message for message in messages if message.get("role") == "assistant"]
        response = answers[-1].get("content") if answers else ""
        self._conversations[instance_id]["response"] = response or ""

        score = await self.calculate_score(instance_id)
        is_right = score == 1.0
        return is_right, RIGHT if is_right else WRONG, score, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return 1 if the latest response has the right number behind "####", else 0."""
        conversation = self._conversations[str(instance_id)]
        return gsm8k.score(conversation["response"], conversation["ground_truth"], method="strict")

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Forget the conversation."""
        self._conversations.pop(str(instance_id), None)
