"""Pure: images and documents, as data or as an address."""

import mimetypes
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

    @property
    def is_text(self) -> bool:
        return bool(_TEXT.match(self.mime_type))

    @property
    def file_name(self) -> str:
        """Its name, or one that fits where the API wants a name."""
        return self.name or unnamed(self.mime_type)


IMAGES = {
    "anthropic": ("image/jpeg", "image/png", "image/gif", "image/webp"),
    "openai_chat": ("image/jpeg", "image/png", "image/gif", "image/webp"),
    "openai_responses": ("image/jpeg", "image/png", "image/gif", "image/webp"),
    "gemini": ("image/jpeg", "image/png", "image/webp", "image/heic", "image/heif"),
}
"""What each takes; one of another kind makes it refuse the whole request."""

_NAMES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}
_TEXT = re.compile(r"text/|application/(?:[\w.-]+\+)?(?:json|xml|yaml|toml|javascript|x-yaml|x-ndjson)$")
_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
_ANY_DATA_URL = re.compile(r"data:([^;,]+)(?:;[^;,]*)*;base64,(.*)", re.DOTALL)
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_EXTENSIONS = {"text/plain": ".txt", "text/markdown": ".md", "text/csv": ".csv", "text/html": ".html"}


def media_of(piece: Piece, provider: str, report: Converted) -> Media | None:
    mime_type, data, url, name = (as_text(piece.block.get(key)) for key in ("mime_type", "data", "url", "name"))
    mime_type, data = held_in(url) or (mime_type, data)
    kind = mime_type.partition(";")[0].strip().lower()
    kind = _NAMES.get(kind, kind)
    if piece.kind == "image" and kind and kind not in IMAGES[provider]:
        report.drop(piece.at, "image", f"{provider} takes no images of the kind {kind}")
        return None
    if data and kind:
        clean = mended(data)
        if clean is None:
            report.drop(piece.at, piece.kind, "its data is no base64")
            return None
        return Media(kind, clean, "", name)
    if url:
        return Media(kind, "", url, name)
    report.drop(piece.at, piece.kind, "it has neither data with a mime_type nor a url")
    return None


def held_in(address: str) -> tuple[str, str] | None:
    """The MIME type and the base64 of an address that holds the data itself."""
    inline = _ANY_DATA_URL.fullmatch(address)
    return (inline[1], inline[2]) if inline else None


def mended(data: str) -> str | None:
    """The base64 with its padding, without line breaks, in the letters that everybody reads; None when it is none."""
    if len(data) % 4 == 0 and _BASE64.fullmatch(data):
        return data
    clean = "".join(data.split()).rstrip("=").replace("-", "+").replace("_", "/")
    clean += "=" * (-len(clean) % 4)
    return clean if len(clean.rstrip("=")) % 4 != 1 and _BASE64.fullmatch(clean) else None


def media_block(kind: str, address: str, name: str | None = None) -> MessageBlock:
    """An image or document from a data URL or an address; a name that we had to make up is none."""
    match = _DATA_URL.fullmatch(address)
    where = {"data": match[2], "mime_type": match[1]} if match and match[2] else {"url": address}
    made_up = match is not None and name == unnamed(match[1])
    return {"type": kind, **where, **({"name": name} if name and not made_up else {})}


def unnamed(mime_type: str) -> str:
    """The file name of a document that has none."""
    known = _EXTENSIONS.get(mime_type, ".txt" if _TEXT.match(mime_type) else ".pdf")
    return f"document{known}"


def guessed_kind(media: Media) -> str:
    """The MIME type, for an address that says none by how it ends."""
    return media.mime_type or mimetypes.guess_type(media.url.partition("?")[0])[0] or ""
