"""Critic and reward model behind PyTriton: the wire format, the multi-rank server, discovery and the asynchronous clients."""
