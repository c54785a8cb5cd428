"""The code that knows Megatron-core: its parallel state, optimizer and clean-up, and a CPU platform for it."""
