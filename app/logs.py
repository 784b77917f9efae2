"""Log lines as JSON, one object a line. Nothing a visitor wrote and no answer is ever part of one."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

import orjson

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
FILE_BYTES = 20 * 1024 * 1024
QUIET = ("httpx", "httpcore", "uvicorn.access", "asyncio", "gradio")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def write_logs_to(file: Path | None) -> None:
    """To that file, or to standard error. Replaces what was set up before."""
    if file is None:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=3, encoding="utf-8")
    handler.setFormatter(JsonFormatter())
    logging.raiseExceptions = False  # a line that a full disk does not take is lost, and floods no terminal
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
