"""Pure: what is too large for a line of the log goes to files beside it, and comes back whole."""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from carrel.conversation.messages import ConversationMessage, MessageBlock, meta_of, text_block

TEXT_LIMIT = 50 * 1024
"""A tool's text over this many bytes goes to `tool-output/`."""
FILE_LIMIT = 64 * 1024
"""An image or document over this many bytes goes to `blobs/`."""
PREVIEW = 2000
"""How many characters of a long output stay in the line, at its head and at its tail."""

_PATH = re.compile(r"(tool-output|blobs)/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_RESULT_TEXTS = ("model_text", "display_text", "content")


class Spilled(NamedTuple):
    message: ConversationMessage
    """The message as the line keeps it; the very same object when nothing was too large."""
    files: dict[str, bytes]
    """What to store beside the log first, by path."""


def may_spill(line: bytes) -> bool:
    """Whether a line is long enough to hold anything that is too large for it."""
    return len(line) > TEXT_LIMIT


OUTPUTS = "tool-output/"

MARK = "spilled"
"""The key of a message that refers to files beside the log, so that a reader need not look at each block."""


def spill(message: ConversationMessage) -> Spilled:
    files: dict[str, bytes] = {}
    content = message.get("content")
    if not isinstance(content, list):
        return Spilled(message, files)
    blocks = [_spill_block(block, files) for block in content]
    return Spilled({MARK: len(files), **message, "content": blocks} if files else message, files)


def _spill_block(block: Any, files: dict[str, bytes]) -> Any:
    if not isinstance(block, dict):
        return block
    kind = block.get("type")
    if kind in ("image", "document"):
        return _spill_file(block, files)
    if kind == "tool_result":
        return _spill_result(block, files)
    return block


def _spill_result(block: MessageBlock, files: dict[str, bytes]) -> MessageBlock:
    changed = dict(block)
    spilled: dict[str, Any] = {}
    for field in _RESULT_TEXTS:
        text = block.get(field)
        if not isinstance(text, str) or len(text) * 4 <= TEXT_LIMIT:
            continue
        data = text.encode("utf-8", "surrogatepass")
        if len(data) <= TEXT_LIMIT:
            continue
        digest = hashlib.sha256(data).hexdigest()
        path = f"{OUTPUTS}{digest[:32]}.txt"
        files[path] = data
        spilled[field] = {"path": path, "bytes": len(data), "sha256": digest}
        changed[field] = (
            f"{text[:PREVIEW]}\n\n[… {len(data):,} bytes in all, kept whole in {path} …]\n\n{text[-PREVIEW:]}"
        )
    content = block.get("content")
    if isinstance(content, list):
        before = len(files)
        inner = [_spill_block(part, files) for part in content]
        if len(files) > before:
            changed["content"] = inner
    if spilled:
        changed["meta"] = {**meta_of(block), "spilled": spilled}
    return changed


def _spill_file(block: MessageBlock, files: dict[str, bytes]) -> MessageBlock:
    text = block.get("data")
    if not isinstance(text, str) or len(text) <= FILE_LIMIT:
        return block
    data, encoding = _decoded(text)
    if len(data) <= FILE_LIMIT:
        return block
    digest = hashlib.sha256(data).hexdigest()
    path = f"blobs/{digest}"
    files[path] = data
    name = str(block.get("name") or "")
    mime_type = str(block.get("mime_type") or "")
    # Other readers of the log see this text where we see the picture.
    what = " ".join(part for part in (str(block.get("type")), name) if part)
    stand_in = text_block(f"[{what}, {mime_type}, {len(data):,} bytes, kept in {path}]")
    rest = {key: value for key, value in block.items() if key != "data"}
    stand_in["meta"] = {
        "blob": {"path": path, "bytes": len(data), "sha256": digest, "encoding": encoding, "block": rest}
    }
    return stand_in


def _decoded(text: str) -> tuple[bytes, str]:
    """The bytes that base64 text stands for, when they give back exactly this text; else the text itself."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode("utf-8", "surrogatepass"), "text"
    if base64.b64encode(data).decode("ascii") != text:
        return text.encode("utf-8", "surrogatepass"), "text"
    return data, "base64"


def blob_of(block: MessageBlock) -> MessageBlock | None:
    """The image or document that a text stands for, without its data; None for any other block."""
    blob = meta_of(block).get("blob")
    file = blob.get("block") if isinstance(blob, dict) else None
    return file if isinstance(file, dict) else None


def paths_of(message: ConversationMessage) -> list[str]:
    """The files that a message as read refers to."""
    content = message.get("content")
    found: list[str] = []
    for block in content if isinstance(content, list) else []:
        _find(block, found)
    return found


def _find(block: Any, found: list[str]) -> None:
    if not isinstance(block, dict):
        return
    meta = meta_of(block)
    spilled, blob = meta.get("spilled"), meta.get("blob")
    references = list(spilled.values()) if isinstance(spilled, dict) else []
    for reference in [*references, blob]:
        path = reference.get("path") if isinstance(reference, dict) else None
        if isinstance(path, str) and _PATH.fullmatch(path):
            found.append(path)
    inner = block.get("content")
    for part in inner if isinstance(inner, list) else []:
        _find(part, found)


def output_paths(message: ConversationMessage) -> list[str]:
    """Those of them that hold long outputs."""
    return [path for path in paths_of(message) if path.startswith(OUTPUTS)] if MARK in message else []


def restore(message: ConversationMessage, files: Mapping[str, bytes]) -> ConversationMessage:
    """The message as it was before `spill`; what is not among the files stays as the line has it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if all(path in files for path in paths_of(message)):
        message = {key: value for key, value in message.items() if key != MARK}
    return {**message, "content": [_restore_block(block, files) for block in content]}


def _restore_block(block: Any, files: Mapping[str, bytes]) -> Any:
    if not isinstance(block, dict):
        return block
    meta = meta_of(block)
    blob, spilled = meta.get("blob"), meta.get("spilled")
    if isinstance(blob, dict) and isinstance(blob.get("block"), dict) and blob.get("path") in files:
        data = files[blob["path"]]
        text = base64.b64encode(data).decode("ascii") if blob.get("encoding") == "base64" else _text(data)
        return _with_data(blob["block"], text)
    changed = dict(block)
    if isinstance(spilled, dict):
        left = {}
        for field, reference in spilled.items():
            if isinstance(reference, dict) and reference.get("path") in files:
                changed[field] = _text(files[reference["path"]])
            else:
                left[field] = reference
        rest = {key: value for key, value in meta.items() if key != "spilled"} | ({"spilled": left} if left else {})
        if rest:
            changed["meta"] = rest
        else:
            changed.pop("meta", None)
    inner = block.get("content")
    if isinstance(inner, list):
        changed["content"] = [_restore_block(part, files) for part in inner]
    return changed


def _with_data(block: MessageBlock, text: str) -> MessageBlock:
    return {"type": block.get("type"), "data": text, **{key: value for key, value in block.items() if key != "type"}}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
