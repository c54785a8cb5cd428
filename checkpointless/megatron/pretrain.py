"""Recovery for Megatron-LM's ``pretrain``, in the place of Megatron's own.

    from checkpointless import HPWrapper
    from checkpointless.megatron.pretrain import pretrain  # in place of: from megatron.training import pretrain

The wheel of Megatron-core 0.19 has ``megatron.training``; earlier ones do not. If the job was started with
``--cpu``, import this before ``megatron.training``, which can be imported without TransformerEngine then.
"""

from checkpointless.integrations.megatron import cpu_platform

if cpu_platform.requested():
    cpu_platform.install()

# After the platform, without which this fails on CPUs.
from checkpointless.integrations.megatron.lm import pretrain

if cpu_platform.requested():
    cpu_platform.install()  # with what Megatron-LM needs, now that it is imported

__all__ = ["pretrain"]
