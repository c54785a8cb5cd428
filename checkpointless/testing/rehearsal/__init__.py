"""The rehearsal: a user's own job, run for some steps without and with faults, and compared bit by bit."""
