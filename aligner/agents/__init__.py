"""Episodes that programs of others play against the policy's endpoint: commands, and task sets of verifiers."""
