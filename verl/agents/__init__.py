"""Agents: loops over model and tools, tool-call formats, environments, the gateway."""
