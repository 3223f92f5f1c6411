"""An OpenAI-compatible server in front of an engine. `server` and `loop` need aiohttp."""

from types import ModuleType

from verl.utils.imports import require

INSTALL = "pip install 'verl[serve]'"


def require_server(purpose: str) -> ModuleType:
    """Import the HTTP server. Raises MissingDependencyError where aiohttp is missing."""
    require("aiohttp", purpose, INSTALL)
    return require("verl.agents.gateway.server", purpose, INSTALL)
