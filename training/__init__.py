"""Training of draft heads: data, losses, evaluation."""
