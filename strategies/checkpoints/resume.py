"""NeMo's auto-resume, put off until memory has been asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo.lightning.resume import AutoResume
from typing_extensions import override

from checkpointless.inprocess import active_call_wrapper


@dataclass(kw_only=True)
class CheckpointlessAutoResume(AutoResume):
    """Looks for a checkpoint on storage only if recovery from memory is not possible.

    It takes all parameters of NeMo's ``AutoResume``. At the first start it does what ``AutoResume`` does; in a
    later generation it waits, as ``trainer.fresume``, until the checkpoint connector asks for it.
    """

    @override
    def setup(self, trainer: Any, model: Any = None, force_setup: bool = False) -> None:
        """Set the trainer's checkpoint path, or put that off.

        Args:
            trainer: the trainer.
            model: the model to load artifacts into.
            force_setup: whether to set the path now in any case.
        """
        call = active_call_wrapper()
        if call is not None and call.generation > 0 and not force_setup:
            trainer.fresume = self
            return
        super().setup(trainer, model)
