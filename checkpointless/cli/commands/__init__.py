"""The commands, one module each: its options, what it checks, and what it does."""
