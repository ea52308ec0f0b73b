"""Critic and reward model behind HTTP servers: the wire format, the multi-rank server, discovery and the asynchronous clients."""
