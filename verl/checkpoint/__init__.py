"""Checkpoints on disk: written whole or not at all, and checked before they are read."""
