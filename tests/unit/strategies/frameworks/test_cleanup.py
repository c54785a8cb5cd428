"""Check that what NeMo keeps in modules is dropped over a restart."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("nemo.lightning", reason="needs NeMo")

pytestmark = pytest.mark.nemo


def test_the_log_files_of_a_trainer_are_closed_and_the_users_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo.utils import lightning_logger_patch
    from nemo.utils import logging as nemo_logging
    from nemo.utils.mcore_logger import add_handlers_to_mcore_logger

    from checkpointless.integrations.lightning.frameworks import nemo as cleanup

    monkeypatch.setattr(cleanup, "_installed", [])
    monkeypatch.setattr(cleanup, "_of_the_user", set())
    monkeypatch.setattr(nemo_logging, "_handlers", dict(nemo_logging._handlers))
    megatrons = logging.getLogger("megatron.core")
    lightnings = lightning_logger_patch.pl._logger
    monkeypatch.setattr(lightning_logger_patch, "HANDLERS", {})
    before = {each: list(each.handlers) for each in (nemo_logging._logger, megatrons, lightnings)}
    try:
        nemo_logging.add_file_handler(tmp_path / "users.txt")
        cleanup.install()
        opened = []
        for generation in range(3):
            nemo_logging.add_file_handler(tmp_path / f"{generation}.txt")
            nemo_logging.add_err_file_handler(tmp_path / f"{generation}-errors.txt")
            add_handlers_to_mcore_logger()
            lightning_logger_patch.add_filehandlers_to_pl_logger(tmp_path / "all.txt", tmp_path / "errors.txt")
            opened += [*lightning_logger_patch.HANDLERS.values()]
            opened += [nemo_logging._handlers["file"], nemo_logging._handlers["file_err"]]
            nemo_logging.warning("generation %d", generation)
            cleanup._close_log_files()
        nemo_logging.warning("and on")
        left = [each for logger in before for each in logger.handlers if isinstance(each, logging.FileHandler)]
        assert not set(left) & set(opened)
        assert [each.stream for each in opened] == [None] * 12, "closed"
        text = (tmp_path / "users.txt").read_text()
        assert "generation 2" in text
        assert "and on" in text
        assert (tmp_path / "0-errors.txt").read_text().count("generation") == 1, "no later one writes there"
    finally:
        for logger, handlers in before.items():
            for each in set(logger.handlers) - set(handlers):
                logger.removeHandler(each)
                each.close()
