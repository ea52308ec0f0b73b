"""Runs under Slurm: what a job consists of, its batch script, and the conductor that runs in it. Standard library only."""
