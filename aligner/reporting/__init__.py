"""What a run reports to its user: metrics.jsonl, loggers, the live view, rollout tables, the summary."""
