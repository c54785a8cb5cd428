"""What happened in a run and how long it took.

Events and step records are written as JSON lines into the run directory by every process of a job; incidents
and verdicts are pure functions of what was read back.
"""
