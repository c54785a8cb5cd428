"""The demo and the rehearsal: how a job is tried out with faults."""
