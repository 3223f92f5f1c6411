"""An OpenAI-compatible server in front of an engine. `server` and `loop` need aiohttp."""

from verl.utils.imports import require


def require_aiohttp(purpose: str) -> None:
    """Raise MissingDependencyError, with the command that installs it, where aiohttp is missing."""
    require("aiohttp", purpose, "pip install 'verl[serve]'")
