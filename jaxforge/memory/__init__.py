"""What is recomputed in the backward pass."""
