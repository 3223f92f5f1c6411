"""Scores for responses: rules by data source, users' own functions, and the managers that run them
over a batch.

Importing this package loads neither torch nor sympy; the processes of the MATH rule rely on it.
"""
