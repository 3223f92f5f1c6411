"""Units of memory. Loads nothing: what judges a broken torch reads them too."""

GIB = 2**30
