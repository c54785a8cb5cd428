"""Megatron-core's ``dist_checkpointing`` with copies: strategies that save and load ``torch_dist`` checkpoints."""
