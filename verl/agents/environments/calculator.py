"""The calculator task as an environment: the world calls the tool, without a tool loop."""

from typing import Any

from verl.agents.environments.base import Observation, environments, user_message
from verl.agents.formats.base import ToolCall
from verl.agents.formats.hermes import HermesFormat
from verl.agents.tools.calculator import calculator
from verl.rewards.builtin.calculator import score


@environments.register("calculator")
class CalculatorEnvironment:
    """Answers hermes calls of `calculator(expression)`; any other turn is the final answer.

    The reward is 1 for the right number, and comes at the end.

    Args:
        max_turns: turns of the model in an episode.
        role: of the messages that carry results.
    """

    def __init__(self, max_turns: int = 4, role: str = "tool") -> None:
        self.max_turns = max_turns
        self.role = role
        self.turns = 0
        self.calls = 0
        self.truth = ""

    async def reset(
        self, question: str | None = None, ground_truth: Any = None, **row: Any
    ) -> Observation:
        """Ask `question`, of the row or its `extra_info`, unless the row's prompt has asked.

        Raises ValueError for a row without question or right answer.
        """
        truth = (row.get("reward_model") or {}).get("ground_truth", ground_truth)
        question = question or (row.get("extra_info") or {}).get("question")
        is_asked = bool(row.get("raw_prompt"))
        if truth is None or (question is None and not is_asked):
            raise ValueError(
                "The calculator environment needs a question and a ground_truth (or "
                "extra_info.question and reward_model.ground_truth) in every row."
            )
        self.turns = 0
        self.calls = 0
        self.truth = str(truth)
        return Observation([] if is_asked else [user_message(str(question))])

    async def step(self, action: str) -> Observation:
        """Answer the calls of a turn, or end the episode."""
        self.turns += 1
        calls = HermesFormat().parse(action, ()).calls
        self.calls += len(calls)
        info = {"turns": self.turns, "calls": self.calls}
        if not calls:
            return Observation([], score(action, self.truth), True, info)

        messages = []
        for call in calls:
            messages.append({"role": self.role, "content": _answer(call)})
        return Observation(messages, 0.0, self.turns >= self.max_turns, info)

    async def close(self) -> None:
        """Nothing to free."""


def _answer(call: ToolCall) -> str:
    """Evaluate a call; mistakes are answered with a sentence for the model."""
    if call.arguments is None:
        return f"Error: {call.error}"
    expression = call.arguments.get("expression")
    if call.name != "calculator" or not isinstance(expression, str):
        return "Error: the only tool is calculator(expression), with a text as expression."
    try:
        return calculator(expression)
    except ValueError as error:
        return f"Error: {error}"
