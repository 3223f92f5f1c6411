"""Training under the name of verl's entropy recipe."""
