"""Evaluation under the names of verl's R1 recipe."""
