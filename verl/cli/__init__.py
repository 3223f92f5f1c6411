"""The command `verl`: a table of commands, each of which is a module that runs by itself too."""
