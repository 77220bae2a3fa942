"""Pure: the blocks of a message as they stand on a page: prose, images, files, and calls with their results."""

import json
import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterable
from dataclasses import dataclass, field

from carrel.conversation.formats.media import held_in, mended
from carrel.conversation.inert import inert, inert_line
from carrel.conversation.messages import ConversationMessage, MessageBlock, blocks_of, meta_of, tool_result_text
from carrel.conversation.prose import prose
from carrel.conversation.telling import size_of

_IMAGE = re.compile(r"image/(png|jpeg|jpg|gif|webp|avif|bmp|svg\+xml)")
# Anything else is offered as plain bytes, so that no browser opens it as a page of its own.
_LONGEST_ADDRESS = 300
_DOCUMENT = re.compile(r"application/(pdf|json)|text/(plain|csv|markdown)")


@dataclass
class Call:
    """A tool call with its result, when there is one."""

    name: str
    brief: str
    inputs: list[tuple[str, str]]
    state: str = "no result"
    output: str = ""
    for_model: str = ""
    """What the model read, where that differs from what people are shown."""
    parts: list["Part"] = field(default_factory=list)


@dataclass
class Part:
    """One block; `kind` says which of the others is filled in."""

    kind: str
    html: str = ""
    text: str = ""
    href: str = ""
    name: str = ""
    detail: str = ""
    call: Call | None = None


class Pairs:
    """Which result answers which call: the first real one after it, else a stand-in. Ids may come again later."""

    def __init__(self, entries: Iterable[ConversationMessage]) -> None:
        self._results: dict[int, MessageBlock] = {}
        self._paired: set[int] = set()
        # Blocks are told apart by identity; holding them keeps that true.
        self._blocks = [block for entry in entries for block in blocks_of(entry)]
        open_calls: dict[str, MessageBlock] = {}
        for block in self._blocks:
            if block.get("type") == "tool_use":
                open_calls[str(block.get("id"))] = block
            elif block.get("type") == "tool_result":
                call = open_calls.get(str(block.get("tool_use_id")))
                if call is not None:
                    self._paired.add(id(block))
                    given = self._results.get(id(call))
                    if given is None or (meta_of(given).get("synthetic") and not meta_of(block).get("synthetic")):
                        self._results[id(call)] = block

    def result_of(self, call: MessageBlock) -> MessageBlock | None:
        return self._results.get(id(call))

    def has_call(self, result: MessageBlock) -> bool:
        return id(result) in self._paired


def part_of(block: MessageBlock, pairs: Pairs) -> Part | None:
    """The block on the page; None where nothing is to be seen, as for a result that stands with its call."""
    kind = block.get("type")
    match kind:
        case "text" | "thinking":
            text = str(block.get("text") or "")
            return Part(kind, html=prose(text)) if text.strip() else None
        case "image" | "document":
            return attachment(block)
        case "tool_use":
            call = _call(block)
            result = pairs.result_of(block)
            return Part("call", call=_answered(call, result) if result is not None else call)
        case "tool_result":
            if pairs.has_call(block):
                return None
            call = Call(f"result of {inert_line(block.get('tool_use_id') or 'an unknown call')}", "", [])
            return Part("call", call=_answered(call, block))
        case _:
            return _other(block)


def _other(block: MessageBlock) -> Part:
    """A block that only its provider understands, under the name that it has there."""
    kind, value = block.get("type"), block.get("value")
    if kind == "native" and isinstance(value, dict):
        kind = f"{value.get('type') or next(iter(value), 'native')} ({block.get('provider')})"
    return Part("other", name=inert_line(kind or "block"), text=pretty(block))


def _call(block: MessageBlock) -> Call:
    given = block.get("input")
    fields = given.items() if isinstance(given, dict) else [("input", given)]
    inputs = [(inert_line(name), inert(value) if isinstance(value, str) else pretty(value)) for name, value in fields]
    brief = next((inert_line(value[:400])[:160] for _, value in inputs if value.strip()), "")
    return Call(inert_line(block.get("name") or "tool"), brief, inputs)


def _answered(call: Call, result: MessageBlock) -> Call:
    for_model = inert(tool_result_text(result))
    shown = result.get("display_text")
    call.output = inert(shown) if isinstance(shown, str) and shown.strip() else for_model
    call.for_model = for_model if for_model.strip() and for_model.strip() != call.output.strip() else ""
    call.state = "interrupted" if meta_of(result).get("synthetic") else "error" if result.get("is_error") else "ok"
    content = result.get("content")
    for block in content if isinstance(content, list) else []:
        if not isinstance(block, dict):
            continue
        if block.get("type") in ("image", "document"):
            call.parts.append(attachment(block))
        elif block.get("type") == "text" and inert(text := str(block.get("text") or "")) not in call.output:
            call.parts.append(Part("text", html=prose(text)))
        elif block.get("type") != "text":
            call.parts.append(_other(block))
    return call


def attachment(block: MessageBlock) -> Part:
    """An image to see, a document to save; what cannot be either is said in words."""
    kind = str(block.get("type"))
    mime = str(block.get("mime_type") or "").lower()
    name = inert_line(block.get("name") or kind)
    data, address = str(block.get("data") or ""), str(block.get("url") or "")
    mime, data = held_in(address) or (mime, data)
    if not data and address:
        return Part("missing", name=name, detail=f"{kind} at {inert_line(address)[:_LONGEST_ADDRESS]}")
    try:
        data = mended(data) or data
        size = len(b64decode(data, validate=True))
    except (NotBase64, ValueError):
        return Part("missing", name=name, detail=f"{kind}, its data cannot be read")
    if not size:
        return Part("missing", name=name, detail=f"{kind}, its data is not here")
    detail = f"{inert_line(mime) or 'unknown kind'}, {size_of(size)}"
    if kind == "image" and _IMAGE.fullmatch(mime):
        return Part("image", href=f"data:{mime};base64,{data}", name=name, detail=detail)
    safe = mime if _DOCUMENT.fullmatch(mime) else "application/octet-stream"
    return Part("document", href=f"data:{safe};base64,{data}", name=name, detail=detail)


def pretty(value: object) -> str:
    """JSON over several lines, harmless to look at."""
    try:
        return inert(json.dumps(value, indent=2, ensure_ascii=False, default=str))
    except RecursionError:
        return "(nested too deeply to show)"
