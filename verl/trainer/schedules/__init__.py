"""Schedules: the order in which the phases of a step run, and what generates meanwhile."""
