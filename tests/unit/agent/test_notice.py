"""Test the command that gives notice of the end of a node: it is run again and again, and never waited for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.launcher.agent import node
from tests.waiting import wait_until


class Polled:
    def __init__(self, *command: str) -> None:
        self.said: list[str] = []
        self.notice = node._Notice(command, self.said.append)
        self.now_s = 100.0
        self.came = 0

    def look(self, after_s: float = 0.0) -> int:
        self.now_s += after_s
        self.came += self.notice.has_come(self.now_s)
        return self.came

    def ends(self) -> None:
        """Wait until the run has ended, and take that in."""
        wait_until(lambda: self.notice._process is None, meanwhile=self.look)


@pytest.fixture
def polled() -> Iterator[list[Polled]]:
    made: list[Polled] = []
    yield made
    for each in made:
        each.notice.close()


def test_exit_code_0_is_a_notice_and_any_other_is_none(polled: list[Polled]) -> None:
    polled += [Polled("true"), Polled("false")]
    for each in polled:
        each.look()
        each.ends()
    assert [each.came for each in polled] == [1, 0]
    for each in polled:
        each.look(node._NOTICE_EVERY_S + 1)
    assert [each.notice._process is None for each in polled] == [True, False], "after a notice there is time"


def test_a_command_that_hangs_is_killed_and_named_once(polled: list[Polled]) -> None:
    hangs = Polled("sleep", "1000")
    polled.append(hangs)
    for _ in range(2):
        hangs.look(node._NOTICE_AGAIN_S)
        hangs.look(node._NOTICE_LIMIT_S + 1)
        hangs.ends()
    assert (hangs.came, hangs.said) == (0, ["the notice command is killed, since it was not over within 30 s"])


def test_a_program_on_a_stalled_file_system_holds_up_nobody(polled: list[Polled], stalled: Path) -> None:
    held = Polled(str(stalled))
    polled.append(held)
    held.look()
    held.look(node._NOTICE_LIMIT_S + 1)
    assert (held.said, held.came) == (["the notice command is killed, since it was not over within 30 s"], 0)
    held.ends()
