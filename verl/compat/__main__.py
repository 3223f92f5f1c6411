"""`python -m verl.compat > docs/reference/import_paths.md` writes that page."""

from verl.compat.paths import page

print(page(), end="")
