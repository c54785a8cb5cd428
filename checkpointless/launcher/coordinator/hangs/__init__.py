"""Ranks without progress: the policy, the watch over them, and what follows."""
