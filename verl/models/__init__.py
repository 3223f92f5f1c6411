"""Load models of transformers, and compute log-probs, values and scores on packed tokens."""
