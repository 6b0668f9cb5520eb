"""Measurements: `python -m bench kernels | decode | heads`."""
