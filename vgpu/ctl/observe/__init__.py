"""Commands that observe a node: events, logs, metrics, trace, dashboard, top."""
