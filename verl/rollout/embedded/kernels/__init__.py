"""Triton kernels of the embedded engine. On CUDA only: whoever runs on the CPU imports none of
them, nor Triton."""
