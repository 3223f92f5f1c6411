"""`python -m verl.compat > docs/reference/import_paths.md` writes that page."""

import sys

from verl.compat.paths import page
from verl.utils.entry import exit_code

sys.exit(exit_code(lambda: print(page(), end="")))
