"""Kernels of the models: each file holds one operation, in Triton or from an optional package."""
