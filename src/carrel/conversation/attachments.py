"""Pure: detach long outputs of tools into files beside the log, and reattach them.

Images and documents stay in the line, where every reader of the format finds them. Earlier versions stored them in
`blobs/`, which is still read."""

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from carrel.conversation.messages import ConversationMessage, MessageBlock, meta_of

TEXT_LIMIT = 50 * 1024
"""A tool output over this many bytes is stored in `tool-output/`."""
PREVIEW = 2000
"""How many characters of a long output stay in the line, at its head and at its tail."""

_PATH = re.compile(r"(tool-output|blobs)/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_RESULT_TEXTS = ("model_text", "display_text", "content")


class Detached(NamedTuple):
    message: ConversationMessage
    """The message as the line has it; the same object if nothing was too large."""
    files: dict[str, bytes]
    """The files to write before the line, by path."""


OUTPUTS = "tool-output/"

MARK = "spilled"
"""The key of a message that refers to files beside the log, so that a reader need not look at each block."""


def detach(message: ConversationMessage) -> Detached:
    files: dict[str, bytes] = {}
    content = message.get("content")
    if not isinstance(content, list):
        return Detached(message, files)
    blocks = [_detach_result(block, files) for block in content]
    return Detached({MARK: len(files), **message, "content": blocks} if files else message, files)


def _detach_result(block: Any, files: dict[str, bytes]) -> Any:
    if not isinstance(block, dict) or block.get("type") != "tool_result":
        return block
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
    if spilled:
        changed["meta"] = {**meta_of(block), "spilled": spilled}
    return changed


def blob_of(block: MessageBlock) -> MessageBlock | None:
    """Return the image or document that a text block replaces, without its data; None for any other block."""
    blob = meta_of(block).get("blob")
    file = blob.get("block") if isinstance(blob, dict) else None
    return file if isinstance(file, dict) else None


def paths_of(message: ConversationMessage) -> list[str]:
    """Return the files that a message from the log refers to."""
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
    """Return the files with long outputs that a message refers to."""
    return [path for path in paths_of(message) if path.startswith(OUTPUTS)] if MARK in message else []


def reattach(message: ConversationMessage, files: Mapping[str, bytes]) -> ConversationMessage:
    """Return the message as it was before `detach`; without its file, a block stays as the line has it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if all(path in files for path in paths_of(message)):
        message = {key: value for key, value in message.items() if key != MARK}
    return {**message, "content": [_reattach_block(block, files) for block in content]}


def _reattach_block(block: Any, files: Mapping[str, bytes]) -> Any:
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
        changed["content"] = [_reattach_block(part, files) for part in inner]
    return changed


def _with_data(block: MessageBlock, text: str) -> MessageBlock:
    return {"type": block.get("type"), "data": text, **{key: value for key, value in block.items() if key != "type"}}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
