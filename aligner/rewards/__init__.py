"""Rewards from Python functions: load one by name, run it beside generation, and never turn a failure into a number (level 2)."""
