"""Tools that score an answer against the ground truth of the row.

The model may try as often as it likes: a step reward of -0.05 punishes an answer that is not better
than the one before, and `calc_reward` gives the score of the last one.
"""

from typing import Any

from verl.agents.tools.base import BaseTool, Executed, ToolArgumentError
from verl.agents.tools.schemas import (
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_schema,
)
from verl.agents.tools.threads import run_in_thread
from verl.rewards.builtin import gsm8k, math
from verl.utils.errors import DataError

NOT_BETTER = -0.05


class AnswerCheckTool(BaseTool):
    """Base of the tools below. Rows give `create_kwargs: {ground_truth: ...}`."""

    tool_name = ""
    subject = ""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._instances: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        answer = {"type": "string", "description": f"The answer to the {self.subject} problem."}
        description = f"Check an answer to the {self.subject} problem and return its score."
        return self.tool_schema or function_schema(self.tool_name, description, {"answer": answer})

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Keep the ground truth.

        Raises:
            DataError: the row gives none.
        """
        identifier = await super().create(instance_id)
        assert isinstance(identifier, str)
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        if ground_truth is None:
            raise DataError(
                f"The tool '{self.name}' needs a ground truth: extra_info.tools_kwargs."
                f"{self.name}.create_kwargs.ground_truth of the row."
            )
        self._instances[identifier] = {"truth": ground_truth, "answer": "", "reward": 0.0}
        return identifier, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> Executed:
        """Score an answer; the text repeats it with its score."""
        if "answer" not in parameters:
            raise ToolArgumentError(f"'{self.name}' needs the argument 'answer', a string")
        answer = str(parameters["answer"])
        state = self._instances[instance_id]
        reward = await self.score(answer, state["truth"])

        step_reward = 0.0 if reward > state["reward"] else NOT_BETTER
        state.update(answer=answer, reward=reward)
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer."""
        return self._instances[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)

    async def score(self, answer: str, ground_truth: Any) -> float:
        """Return 1 for a right answer, else 0."""
        raise NotImplementedError


class Gsm8kTool(AnswerCheckTool):
    """Checks the answer to a GSM8K problem by the rule for that data set."""

    tool_name = "calc_gsm8k_reward"
    subject = "GSM8K"

    async def score(self, answer: str, ground_truth: Any) -> float:
        marked = answer if answer.startswith("#### ") else f"#### {answer}"
        return gsm8k.score(marked, ground_truth, method="flexible")


class Geo3kTool(AnswerCheckTool):
    """Checks the answer to a Geometry3K problem by the MATH rule: equal expressions are equal."""

    tool_name = "calc_geo3k_reward"
    subject = "Geometry3K"

    async def score(self, answer: str, ground_truth: Any) -> float:
        boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
        # sympy computes in a process of its own; the thread waits for it.
        return await run_in_thread(math.score, boxed, ground_truth)
