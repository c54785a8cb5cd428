"""What happened in a run, and how long it took: events, metrics, incidents, reports."""
