"""`aligner preflight`: tests a job's requirements in minutes on its own nodes (docs/running.md)."""
