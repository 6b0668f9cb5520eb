"""What the folders share: files, values, and what the machine has."""
