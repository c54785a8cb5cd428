"""Records of what happened in a run and how long it took.

Every process of a job writes events and step records as JSON lines into the run directory. Incidents and verdicts
are pure functions of the records that are read back.
"""
