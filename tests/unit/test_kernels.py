"""Which kernels no abort ends, as a config asks for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from checkpointless.integrations.compat.precision import unabortable


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tp_comm_overlap": True}, "a kernel of TransformerEngine's user buffers cannot be freed"),
        (
            {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"},
            "set moe_enable_deepep=False, moe_token",
        ),
        (
            {"moe_token_dispatcher_type": "flex"},
            "set moe_token_dispatcher_type='alltoall', or CHECKPOINTLESS_SPINN",
        ),
    ],
)
def test_kernels_that_wait_for_peers_by_themselves_are_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object], words: str
) -> None:
    reason = unabortable(SimpleNamespace(**config))
    assert reason is not None
    assert words in reason
    assert "\n" not in reason
    monkeypatch.setenv("CHECKPOINTLESS_SPINNING_KERNELS", "1")
    assert unabortable(SimpleNamespace(**config)) is None


@pytest.mark.parametrize(
    "config",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(tp_comm_overlap=False, moe_enable_deepep=None, moe_token_dispatcher_type="alltoall"),
        SimpleNamespace(tp_comm_overlap=object()),
    ],
)
def test_other_configs_are_not(config: object) -> None:
    assert unabortable(config) is None
