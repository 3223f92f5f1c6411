"""Training under the name of verl's one-step-off-policy recipe."""
