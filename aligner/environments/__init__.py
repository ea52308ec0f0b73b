"""Conversations of several turns: what an environment is, the calls to it, tools, and two environments to use and to copy."""
