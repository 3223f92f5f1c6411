"""Training under the name of verl's DAPO recipe."""
