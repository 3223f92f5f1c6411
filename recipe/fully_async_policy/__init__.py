"""Training under the name of verl's fully asynchronous recipe."""
