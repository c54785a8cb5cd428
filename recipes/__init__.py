"""NeMo recipes in YAML that a user copies, and the runner that trains one in a rank's process."""
