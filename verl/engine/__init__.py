"""Train a module: micro-batches, forward and backward, optimizer, memory, save and load."""
