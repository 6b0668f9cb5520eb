"""Training: text into tokens, losses, evaluation, processes."""
