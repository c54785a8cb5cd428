"""What cannot be carried through a fault is refused before training, in one line that says what to set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from checkpointless.integrations import transformers as adapter


class Stand:
    _init_training_state = _prepare_for_training = _run_epoch = _get_grad_norm = _load_rng_state = None

    def __init__(self, **changed: Any) -> None:
        self.is_deepspeed_enabled, self.is_fsdp_enabled = changed.pop("deepspeed", False), "version" in changed
        plugin = SimpleNamespace(fsdp_version=changed.pop("version", 2))
        self.accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin), scaler=changed.pop("scaler", None)
        )
        args = {"auto_find_batch_size": False, "ignore_data_skip": False, "n_gpu": 1}
        self.args = SimpleNamespace(**args | changed)


def _refusal(**changed: Any) -> str:
    trainer: Any = Stand(**changed)
    return adapter._refusal(trainer) or ""


def test_what_is_known_is_not_refused() -> None:
    assert _refusal() == _refusal(version=2) == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"deepspeed": True}, "set fsdp"),
        ({"version": 1}, "{'version': 2}"),
        ({"scaler": object()}, "bf16=True"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"ignore_data_skip": True}, "leave it out"),
        ({"n_gpu": 2}, "a process for each GPU"),
    ],
)
def test_a_setting_is_refused(changed: dict[str, Any], said: str) -> None:
    reason = _refusal(**changed)
    assert (said in reason, "\n" in reason) == (True, False)


def test_an_unknown_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Stand, "_run_epoch")
    assert _refusal().startswith(f"transformers {transformers.__version__} has no Trainer._run_epoch")


def test_outside_of_a_block_it_is_the_trainers_own() -> None:
    trainer: Any = SimpleNamespace(train=lambda resume, **more: (resume, more))
    assert adapter.train(trainer, "saves", trial=1) == ("saves", {"trial": 1})
