"""What the command lines need beside the library: tuning, comparing, talking."""
