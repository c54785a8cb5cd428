"""What ties a strategy to the block that is entered again.

It announces the phases of a step, completes the trainer's callbacks, and records how long a build takes.
"""
