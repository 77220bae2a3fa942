"""Pure: images and documents, as data or as an address."""

import re
from typing import NamedTuple

from carrel.conversation.formats.turns import Converted, Piece, as_text
from carrel.conversation.messages import MessageBlock


class Media(NamedTuple):
    """An image or document: base64 data with its MIME type, or an address."""

    mime_type: str
    data: str
    url: str
    name: str

    @property
    def address(self) -> str:
        return self.url or f"data:{self.mime_type};base64,{self.data}"


_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)


def media_of(piece: Piece, report: Converted) -> Media | None:
    mime_type, data, url, name = (as_text(piece.block.get(key)) for key in ("mime_type", "data", "url", "name"))
    if inline := _DATA_URL.fullmatch(url):
        mime_type, data = inline[1], inline[2]
    if data and mime_type:
        return Media(mime_type, data, "", name)
    if url:
        return Media(mime_type, "", url, name)
    report.drop(piece.at, piece.kind, "it has neither data with a mime_type nor a url")
    return None


def media_block(kind: str, address: str, name: str | None = None) -> MessageBlock:
    """An image or document from a data URL or an address."""
    match = _DATA_URL.fullmatch(address)
    where = {"data": match[2], "mime_type": match[1]} if match and match[2] else {"url": address}
    return {"type": kind, **where, **({"name": name} if name else {})}
