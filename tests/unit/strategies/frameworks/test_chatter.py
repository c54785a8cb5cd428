"""What frameworks say of their set-up at a restart is kept back, and everything else is not."""

import logging
from collections.abc import Iterator

import pytest

from checkpointless.integrations.lightning.frameworks import loggers
from checkpointless.observability.telemetry.scribe import apply_log_level, asked_for_level
from checkpointless.system.environment import LOG_LEVEL_ENV

pytestmark = pytest.mark.nemo


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(LOG_LEVEL_ENV, raising=False)
    yield
    loggers.speak()


def said_by_nemo_to_the_root_logger(level: int) -> logging.LogRecord:
    return logging.LogRecord("root", level, "/x/site-packages/nemo/lightning/data.py", 1, "said", (), None)


def test_only_warnings_of_the_frameworks_come_through() -> None:
    megatron, ours = logging.getLogger("megatron.core.optimizer"), logging.getLogger("my.training")
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    ours.setLevel(logging.INFO)
    loggers.quiet()
    loggers.quiet()
    assert not megatron.isEnabledFor(logging.INFO)
    assert megatron.isEnabledFor(logging.WARNING)
    assert not logging.getLogger("lightning.pytorch").isEnabledFor(logging.INFO)
    assert ours.isEnabledFor(logging.INFO)
    assert not logging.getLogger().filter(said_by_nemo_to_the_root_logger(logging.INFO))
    assert logging.getLogger().filter(said_by_nemo_to_the_root_logger(logging.WARNING))
    loggers.speak()
    assert logging.getLogger("lightning.pytorch").level == logging.INFO
    assert logging.getLogger("megatron").level == logging.NOTSET
    assert logging.getLogger().filter(said_by_nemo_to_the_root_logger(logging.INFO))


def test_who_debugs_hears_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_ENV, "debug")
    loggers.quiet()
    assert logging.getLogger("megatron").level == logging.NOTSET


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for_level() is None
    monkeypatch.setenv(LOG_LEVEL_ENV, "info")
    package = logging.getLogger("checkpointless")
    before = package.level, list(package.handlers), package.propagate
    try:
        apply_log_level()
        apply_log_level()
        assert package.level == logging.INFO
        assert len(package.handlers) == len(before[1]) + 1
    finally:
        package.setLevel(before[0])
        package.handlers[:] = before[1]
        package.propagate = before[2]
