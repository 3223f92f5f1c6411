"""Running code that nobody has read: `runner` is what a rule calls; the rest lives in a helper
process of its own.

The server (`server`) is a small Python process that forks for every run. What a run may do is set
by `isolation` (namespaces with a file system of its own) and `seccomp` (a filter of system calls).
"""
