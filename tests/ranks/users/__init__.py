"""Provide training scripts as users write them, with callbacks, validations, checkpoints, loggers and data.

The demo's recipe proves model, optimizer and loops; these scripts are for all that a real run has beside them. A
script writes down at its end what must be equal to the end of an undisturbed run.
"""
