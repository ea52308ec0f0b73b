"""`aligner preflight`: what a job will need, tried in minutes on the nodes that it was given (docs/running.md)."""
