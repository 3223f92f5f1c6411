"""Checkpoints: whole or absent, verified when read."""

from verl.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
