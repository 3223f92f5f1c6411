"""`python -m verl COMMAND` is the command `verl`."""

import sys

from verl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
