"""What NeMo keeps outside of a training's state: patches, log files, telemetry and datasets."""
