"""Sets of tools whose calls a test makes in a coroutine."""

import asyncio

from tests.agents.tools.user_tools import (
    OldCounter,
)


def counter(**config):
    return OldCounter(config, None)


def run_with(tools, scenario):
    """Run a scenario with a set of tools, and close it."""

    async def run():
        try:
            return await scenario(tools)
        finally:
            await tools.aclose()

    return asyncio.run(run())
