"""Engines that are servers: vLLM and SGLang, each in an environment of its own."""

from verl.rollout.servers.engine import ServerEngine, SGLangEngine, VLLMEngine
from verl.rollout.servers.sender import ServerSender

__all__ = ["SGLangEngine", "ServerEngine", "ServerSender", "VLLMEngine"]
