"""The training loop: one optimizer step, the run around it, and what it reports."""
