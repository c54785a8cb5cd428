"""Events and step records of a run, as JSON lines in its directory, and what is read back of them."""
