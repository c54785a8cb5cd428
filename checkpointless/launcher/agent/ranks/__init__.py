"""The ranks of a node: their processes, from the zygote that forks them to their ends, and what they say."""
