"""What NeMo and Lightning keep outside of a training's state: messages, log files, loggers, patches and spans."""
