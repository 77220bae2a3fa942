"""Pure: the body of an HTTP answer as data that code can go on with."""

import json
from typing import Any

_TEXT = (
    "text/",
    "application/csv",
    "application/graphql",
    "application/javascript",
    "application/jsonl",
    "application/ndjson",
    "application/toml",
    "application/x-ndjson",
    "application/x-www-form-urlencoded",
    "application/x-yaml",
    "application/xml",
    "application/yaml",
)
_TEXT_ENDS = ("+xml", "+yaml")


def is_json(content_type: str) -> bool:
    kind = _kind(content_type)
    return kind == "application/json" or kind.endswith("+json")


def is_text(content_type: str) -> bool:
    kind = _kind(content_type)
    return is_json(kind) or kind.startswith(_TEXT) or kind.endswith(_TEXT_ENDS)


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def value_of(content_type: str, charset: str, body: bytes) -> Any:
    """JSON as data, text as text, anything else as bytes; nothing is None. `ValueError` for JSON that is none."""
    if not body:
        return None
    if is_json(content_type):
        return json.loads(body)
    if is_text(content_type):
        return decoded(body, charset)
    if not content_type:
        try:
            return body.decode()
        except UnicodeDecodeError:
            return body
    return body


def decoded(body: bytes, charset: str) -> str:
    """The text, in the charset it claims where there is one."""
    try:
        return body.decode(charset or "utf-8", "replace")
    except LookupError:
        return body.decode("utf-8", "replace")
