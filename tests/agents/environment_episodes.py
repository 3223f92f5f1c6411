"""Episodes in an environment whose actions are given."""

import asyncio

from verl.agents.environments import EnvironmentSession, Observation


def play(environment, actions, timeout_s=30.0, **row):
    """Run an episode and return its session and observations."""

    async def main():
        async with EnvironmentSession(lambda: environment, timeout_s) as session:
            seen = [await session.reset(**row)]
            for action in actions:
                if not session.done:
                    seen.append(await session.step(action))
        return session, seen

    return asyncio.run(main())


def texts(observations: list[Observation]) -> list[str]:
    return [message["content"] for seen in observations for message in seen.messages]
