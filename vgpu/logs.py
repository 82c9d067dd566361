"""Structured logs of the long-lived processes: one line per event on stderr, which the node directs to a file."""

from __future__ import annotations

import os
import sys

import structlog


def to_stderr() -> None:
    """For people on a terminal, as JSON elsewhere. ``VGPU_LOG=json|text`` decides otherwise."""
    form = os.environ.get("VGPU_LOG") or ("text" if sys.stderr.isatty() else "json")
    render = structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            render,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
