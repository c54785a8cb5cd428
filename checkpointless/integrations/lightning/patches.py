"""The function that HyperPod's documented script imports from its module of patches."""

from __future__ import annotations


def patch_megatron_optimizer() -> None:
    """Do nothing: the strategy guards the update of every Megatron optimizer, fp32 included, and patches none.

    The function exists so that a script written for HyperPod runs when its imports have been renamed.
    """
