"""The policy behind HTTP: the interfaces that agents and clients already speak, and the sessions that their calls make up."""
