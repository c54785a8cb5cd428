"""Test how a process takes signals for a job, and what would become of another one that got them."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from checkpointless.launcher.agent.ranks.zygote import _forget_handlers
from checkpointless.system.signals import ENDING, PASSED_ON, handling, is_default


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*ENDING, *PASSED_ON)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "action", "comes"),
    [
        *((number, signal.SIG_DFL, True) for number in (*ENDING, *PASSED_ON)),
        *((number, signal.SIG_IGN, False) for number in (signal.SIGHUP, signal.SIGUSR1)),  # as nohup does
        (signal.SIGINT, signal.SIG_IGN, True),  # as a shell does in the background
    ],
)
def test_a_signal_is_noted_and_has_its_action_again_afterwards(number: int, action: int, comes: bool) -> None:
    signal.signal(number, action)
    came: list[int] = []
    with handling([number], came.append):
        signal.raise_signal(number)
    assert (came, signal.getsignal(number)) == ([number] * comes, action)


def test_a_forked_process_forgets_handlers_and_keeps_what_is_ignored() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _forget_handlers()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == (signal.SIG_DFL, signal.SIG_IGN)


def test_a_handler_of_another_process_is_seen() -> None:
    assert not is_default(-1, signal.SIGUSR1), "nothing is known of it"
    code = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not is_default(process.pid, signal.SIGUSR1)
        assert is_default(process.pid, signal.SIGUSR2)
        process.kill()
