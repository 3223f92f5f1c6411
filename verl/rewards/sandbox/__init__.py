"""Run untrusted code. Rules call `runner`; all other modules run in a helper process.

The server (`server`) is a small Python process that forks for every run. A run is restricted by
`isolation` (namespaces with their own file system) and `seccomp` (a filter of system calls).
"""
