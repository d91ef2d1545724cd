"""HVPIPE_LOG_LEVEL: which messages appear, and which handler prints them."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from distributed import ALONE, launch
from hvpipe import log


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return hvpipe's logger as in a program without logging of its own, and without pytest's handlers."""
    found = logging.Logger("hvpipe")
    monkeypatch.setattr(log, "logger", found)
    return found


def test_a_level_shows_its_messages_and_more_severe_ones(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_log_level("info", rank=3)
    logger.debug("hvpipe: too fine")
    logger.info("hvpipe: told")
    assert capsys.readouterr().err == "[rank 3] hvpipe: told\n"


def test_the_programs_handlers_stay_the_only_ones(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    own = io.StringIO()
    logger.addHandler(logging.StreamHandler(own))
    log.set_log_level("debug", rank=0)
    logger.debug("hvpipe: told")
    assert (own.getvalue(), capsys.readouterr().err) == ("hvpipe: told\n", "")


def test_without_a_level_nothing_is_changed(logger: logging.Logger) -> None:
    logger.setLevel(logging.ERROR)
    log.set_log_level(None, rank=0)
    assert (logger.level, logger.handlers) == (logging.ERROR, [])


@pytest.mark.parametrize(("level", "told"), [("info", True), ("warning", False)])
def test_the_variable_has_its_effect(level: str, told: bool, tmp_path: Path) -> None:
    script = tmp_path / "case.py"
    script.write_text("import hvpipe; hvpipe.init()")
    result = launch(ALONE, [script], limit_s=60, env={"HVPIPE_LOG_LEVEL": level})
    assert result.returncode == 0, result.describe()
    assert ("[rank 0] hvpipe: rank 0 of 1 is on " in result.output) is told, result.describe()
