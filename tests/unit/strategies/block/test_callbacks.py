"""The callbacks that a fit needs: added once, whatever the trainer was given."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nemo.lightning", reason="needs NeMo")

from lightning.pytorch.callbacks import Callback

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.strategies.block.callbacks import complete

pytestmark = pytest.mark.nemo


def test_ours_is_added_behind_the_users() -> None:
    users: list[Any] = [Callback()]
    present = list(users)
    added = complete(present, None)
    assert present == [*users, added]


def test_a_callback_with_settings_stays_the_only_one() -> None:
    given = CheckpointlessCallback(enable_checksum=True)
    present: list[Any] = [given]
    assert complete(present, None) is given
    assert complete(present, None) is given
    assert present == [given]
