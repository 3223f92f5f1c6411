"""Command `verl`: a table of commands, each a module that also runs by itself."""
