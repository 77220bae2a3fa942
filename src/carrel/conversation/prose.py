"""Pure: what somebody wrote in Markdown, as HTML that can do nothing but be read."""

import re
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

from carrel.conversation.inert import inert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markdown_it import MarkdownIt
    from markdown_it.token import Token

LONGEST_MARKDOWN = 256 * 1024
"""Longer text is shown as it is: nobody formatted so much by hand."""

_SAFE_LINK = re.compile(r"(?i)(https?://|mailto:)\S+")
_REL = "noopener noreferrer nofollow"


def prose(text: str) -> str:
    """Headings, lists, tables, code, and links to the web or to mail; tags in the text are letters like any other."""
    text = inert(text)
    if len(text) > LONGEST_MARKDOWN:
        return f"<pre>{escape(text)}</pre>"
    # Twice: an entity (`&#x202e;`) becomes its character only here.
    return inert(_reader().render(text))


@lru_cache(maxsize=1)
def _reader() -> "MarkdownIt":
    from markdown_it import MarkdownIt  # noqa: PLC0415 -- only a page needs it, `import carrel` does not

    reader = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    # A link that is refused stays in the text as it was typed.
    reader.validateLink = lambda url: bool(_SAFE_LINK.fullmatch(url))  # type: ignore[method-assign]
    for kind, rule in (
        ("image", _image),
        ("link_open", _link_open),
        ("th_open", _cell_open),
        ("td_open", _cell_open),
        ("table_open", _table_open),
        ("table_close", _table_close),
    ):
        reader.add_render_rule(kind, rule)
    return reader


def _image(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    # An image from elsewhere would tell its server who reads the page, and when; so it is a link.
    name = renderer.renderInlineAsText(tokens[index].children or [], options, env) or "image"
    source = str(tokens[index].attrs.get("src", ""))
    if not source:
        return f"[{escape(name)}]"
    return f'<a href="{escape(source)}" rel="{_REL}">[{escape(name)}]</a>'


def _link_open(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    tokens[index].attrs["rel"] = _REL
    if not tokens[index].attrs.get("href"):
        # `[text]()` is never asked about, and an empty link would lead to this page itself.
        tokens[index].attrs.pop("href", None)
    return str(renderer.renderToken(tokens, index, options, env))


def _cell_open(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    align = str(tokens[index].attrs.pop("style", "")).removeprefix("text-align:")
    if align in ("right", "center"):
        tokens[index].attrs["class"] = align
    return str(renderer.renderToken(tokens, index, options, env))


def _table_open(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    return '<div class="wide"><table>\n'


def _table_close(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    return "</table></div>\n"
