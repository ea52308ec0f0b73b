"""What a run tells its user: metrics.jsonl, loggers, the live view, rollout tables, the summary."""
