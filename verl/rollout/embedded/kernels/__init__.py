"""Hold the kernels of the embedded engine.

Those in Triton are for CUDA alone: a process on the CPU imports neither them nor Triton.
"""
