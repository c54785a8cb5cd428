"""The nodes of a job: who joins, is lost, comes back, or is taken over from an earlier coordinator."""
