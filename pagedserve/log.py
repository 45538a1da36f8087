"""Logging for every process: one line a record, to stderr, as text or as JSON (`--log-format json`)."""

from __future__ import annotations

import json
import logging
import sys
import time

_ROOT = "pagedserve"


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str):
        super().__init__(f"%(asctime)s %(levelname).1s {process}: %(message)s", datefmt="%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(*, process: str, level: str = "info", fmt: str = "text") -> None:
    """Set up the `pagedserve` logger of this process; safe to call again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if fmt == "json" else _TextFormatter(process))
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def get_logger(name: str) -> logging.Logger:
    """A logger below `pagedserve`, named after the module."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
