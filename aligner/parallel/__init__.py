"""Ranks, devices and what they exchange: platform, launch, topology, collectives, log-probs."""
