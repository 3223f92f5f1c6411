"""The engine that runs the Hugging Face module itself over a paged cache."""

from verl.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
