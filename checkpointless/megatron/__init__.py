"""The public names for Megatron-core without NeMo; the code is in :mod:`checkpointless.integrations.megatron`."""
