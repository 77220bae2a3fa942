"""The log lines of the HTTP client, which tell URLs and headers, without what is secret in them."""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from carrel.library.tools.secrets import Secrets

_LOGGERS = (
    "httpx2",
    *(f"httpcore2{part}" for part in ("", ".connection", ".http11", ".http2", ".proxy", ".socks")),
    "mcp.client.streamable_http",
    "mcp.client.sse",
)
_OURS: ContextVar[Secrets | None] = ContextVar("carrel_secrets_of_requests", default=None)


@contextlib.contextmanager
def hidden_in_logs(secrets: Secrets) -> Iterator[None]:
    """Meanwhile, what is logged of requests made here, or in tasks begun here, has no secret in it."""
    for name in _LOGGERS:
        # Adding the same one again changes nothing.
        logging.getLogger(name).addFilter(_cleared)
    before = _OURS.set(secrets)
    try:
        yield
    finally:
        _OURS.reset(before)


def _cleared(record: logging.LogRecord) -> bool:
    secrets = _OURS.get()
    if secrets is not None:
        record.msg, record.args = secrets.hide(record.getMessage()), ()
        # Whoever called is told what went wrong; tracebacks of the SDK, and what is in them, are of use to nobody else.
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return True
