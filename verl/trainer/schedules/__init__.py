"""Schedules: the order of the phases of a step, and generation ahead of the update."""
