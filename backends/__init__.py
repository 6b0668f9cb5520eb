"""What is applied to a model from outside, by replacing its layers, so that model.py need not know
it."""
