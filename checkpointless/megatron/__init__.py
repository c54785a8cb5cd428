"""The few places that know Megatron-core: its parallel state, optimizer and clean-up, and a CPU to run it on."""
