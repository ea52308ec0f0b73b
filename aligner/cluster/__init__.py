"""Where a run lives and how its components are started."""
