"""Predict and measure the needs of a run: memory, software, links between machines.

The room reads all rooms below it; no state of a run lives here.
"""
