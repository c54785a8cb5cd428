"""Stands for TransformerEngine, which needs CUDA, where ranks of the tests build Megatron's TE modules on CPUs.

It has what bites when a model is kept over a fault, and no more: the names of TransformerEngine's modules, what
they keep in attributes from step to step, and the process groups and random streams that they hold. The properties
are those of TransformerEngine 2.9, which Megatron-core 0.15 is made for; each class says in which file and line
they are found (`git show v2.9:transformer_engine/pytorch/...`). What it computes is plain torch. Classes of files
that nothing imports by name share one here.
"""

from transformer_engine import common, pytorch
from transformer_engine.common import recipe

__version__ = "2.9.0"
__all__ = ["common", "pytorch", "recipe"]
