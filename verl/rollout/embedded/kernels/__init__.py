"""Hold the kernels of the embedded engine.

Those in Triton are for CUDA alone: a process on the CPU imports neither them nor Triton.
"""

# Multiprocessors of an H100 and an H200, which launches fill; others are filled less evenly. A
# constant, not the number of the device at hand: the same bits on every device of one architecture.
PROCESSORS = 132
