"""Scheduling and policies that build on generate.py."""
