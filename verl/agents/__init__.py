"""Agents: loops of several turns on one engine."""
