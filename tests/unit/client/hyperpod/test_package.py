"""Test that a vendor's package that is missing, broken or too old is said in one line."""

import importlib
import sys
from pathlib import Path

import pytest

from checkpointless.launcher.client.factory import HPAgentK8sAPIFactory
from checkpointless.launcher.client.hyperpod.client import _VendorPackage
from tests import hyperpod_stand_in as stand_in


def test_a_missing_package_is_one_line_that_says_what_to_do(environment: pytest.MonkeyPatch) -> None:
    for name in stand_in.modules():
        environment.setitem(sys.modules, name, None)
    environment.setenv(stand_in.SOCKET_ENV, "/nowhere")
    with pytest.raises(RuntimeError, match=r"not installed.*pip install -e '\.\[hyperpod\]' in a clone") as raised:
        HPAgentK8sAPIFactory()()
    assert "\n" not in str(raised.value)


def test_a_package_that_misses_one_of_its_own_is_told_apart(environment: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    environment.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match=r"cannot be imported \(No module named 'fastapi'\)"):
        _VendorPackage.load()


class OldClient:
    """Stands in for the client of an older package."""

    hyperpod_barrier = hyperpod_wait_fault = hyperpod_send_fault = hyperpod_wait_rank_info = print


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "InProcessRestartSocketClient",
            OldClient,
            "has no InProcessRestartSocketClient.hyperpod_past_rcb_barrier:",
        ),
        ("InProcessRestartSocketClient", None, "InProcessRestartSocketClient.hyperpod_wait_rank_info, "),
        ("HyperPodIPCException", None, "has no HyperPodIPCException: install a version"),
        ("RestartMode", None, "RestartMode.IN_PROCESS_RESTART"),
    ],
)
def test_a_package_without_a_name_that_is_used(
    environment: pytest.MonkeyPatch, name: str, value: object, said: str
) -> None:
    for module in stand_in.modules(**{name: value}).items():
        environment.setitem(sys.modules, *module)
    with pytest.raises(RuntimeError) as raised:
        _VendorPackage.load()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_agent_that_is_not_there(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv(stand_in.SOCKET_ENV, str(tmp_path / "nobody"))
    with pytest.raises(RuntimeError, match=r"cannot be reached .* --inprocess-restart"):
        HPAgentK8sAPIFactory()()
