"""Faults at random moments of whole runs. `make chaos` runs the campaign, the tests a sample of it."""
