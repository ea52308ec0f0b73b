"""Multi-turn conversations: the environment protocol, the calls to it, tools, and two example environments."""
