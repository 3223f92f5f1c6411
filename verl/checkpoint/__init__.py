"""Checkpoints on disk: written completely or not at all, and verified before they are read."""
