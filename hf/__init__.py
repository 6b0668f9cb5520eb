"""Reads Hugging Face folders and GGUF files: config, weights, tokenizer and chat template."""
