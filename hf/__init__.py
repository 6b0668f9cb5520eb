"""What Hugging Face folders hold: weights, tokenizers, chat templates."""
