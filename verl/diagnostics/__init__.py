"""Predict and measure a run: memory, software, links between machines, and the page of its record.

The room reads all rooms below it; no state of a run lives here.
"""
