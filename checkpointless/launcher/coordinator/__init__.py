"""Decides for the whole job: who belongs together, when a generation begins, and when the job is over."""
