"""Stands for the state of FP8, which is off."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    """Says that nothing is in FP8."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def reset(cls) -> None:
        """Do nothing: nothing is kept."""


fp8_autocast = nullcontext
