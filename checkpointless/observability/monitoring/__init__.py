"""What a running job shows of itself over HTTP: snapshots in, health, status and metrics out."""
