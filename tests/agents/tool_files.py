"""Files of tools and of a simulated user, and calls of the tools as a model writes them."""

TOOLS = '''
from verl.agents.tools import function_tool


@function_tool(isolation="thread")
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


@function_tool(isolation="thread")
def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: of the failure.
    """
    raise ValueError(reason)
'''


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


INTERACTION = """
from verl.agents.interactions import BaseInteraction

LOG = {log!r}


class Quiz(BaseInteraction):
    async def start_interaction(self, instance_id=None, answer="", **kwargs):
        self.answers = getattr(self, "answers", {{}})
        self.answers[instance_id] = answer
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        is_right = self.answers[instance_id] in messages[-1]["content"]
        return is_right, "Right!" if is_right else "Try again.", float(is_right), {{}}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        with open(LOG, "a") as file:
            file.write(instance_id + "\\n")
"""
