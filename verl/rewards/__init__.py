"""Score responses: rules by data source, users' functions, and managers that apply them to a batch.

Importing this package loads neither torch nor sympy; the processes of the MATH rule rely on it.
"""
