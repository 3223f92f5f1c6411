"""The contract between the HTTP server and whatever answers its requests."""

from collections.abc import Callable, Sequence
from typing import Protocol

from verl.agents.gateway.requests import ChatRequest, CompletionRequest, DrawSettings
from verl.agents.gateway.wording import Reply, Wording

# Called with the number of a choice, and with tokens and log-probs that it has newly drawn.
Listen = Callable[[int, Sequence[int], Sequence[float]], None]


class Backend(Protocol):
    """Answers requests that were read and admitted.

    A request that is cancelled is aborted: it takes no further step of the engine.
    """

    wording: Wording
    model: str  # the name that clients get
    is_lenient: bool  # whether it ignores fields that it cannot honor, instead of refusing them

    def admit(self, key: str, session: str | None) -> str | None:
        """Return the session of a request, from its API key and the session in its path.

        Raises ApiError for a wrong key, and for a session that does not run.
        """
        ...

    def stops(self, draw: DrawSettings) -> tuple[str, ...]:
        """Return the texts that end a reply of a request."""
        ...

    async def chat(
        self, session: str | None, request: ChatRequest, listen: Listen | None = None
    ) -> list[Reply]:
        """Return the choices of a conversation's next turn.

        Calls `listen` with tokens as they are drawn, if the engine shows them before the end.
        """
        ...

    async def complete(
        self, session: str | None, request: CompletionRequest, listen: Listen | None = None
    ) -> list[Reply]:
        """Return the choices after each prompt, in the order of the prompts. See `chat`."""
        ...

    async def run(self) -> None:
        """Do the background work of a running server. Cancelled at its end."""
        ...
