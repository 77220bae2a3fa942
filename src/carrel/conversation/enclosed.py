"""Pure: Markdown that somebody wrote, put into a larger text: it ends where it ends, and passes for nothing else."""

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from carrel.conversation.prose import LONGEST_MARKDOWN

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

_PASSES = 8
_ACTS = re.compile(r"<|!\[|&#|^ {0,3}(?:#|`{3}|~{3}|=+[ \t]*$|-+[ \t]*$)", re.MULTILINE)
"""Without one of these a text is letters, lists and links, and nothing has to be looked at."""
_TICKS = re.compile("`+")
_INLINE = re.compile(r"\\.|`+|<(?=[A-Za-z/!?])|!\[|&(?=#)", re.DOTALL)
_AUTOLINK = re.compile(r"<(?:https?://|mailto:)[^\s<>]*>", re.IGNORECASE)
_ATX = re.compile(r"^( {0,3})(#{1,2})(?=[ \t]|$)")


def enclosed(text: str) -> str:
    """The text with tags and numbered characters as they were typed, pictures from elsewhere as links, its headings
    below those of who spoke, and every code block closed."""
    if not _ACTS.search(text):
        return text
    if len(text) <= LONGEST_MARKDOWN:
        for _ in range(_PASSES):
            lines = text.split("\n")
            tokens = _reader().parse(text)
            blocks = [token.map for token in tokens if token.type == "html_block" and token.map]
            if not blocks:
                return "\n".join(_shown(lines, tokens))
            # What a tag hid is Markdown once the tag is none, so it is read again.
            for first, end in blocks:
                lines[first:end] = [_without_tags(line) for line in lines[first:end]]
            text = "\n".join(lines)
    return fenced(text)


def fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of ticks inside, so that nothing inside can end it."""
    longest = max(map(len, _TICKS.findall(text)), default=0) if "`" in text else 0
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


@lru_cache(maxsize=1)
def _reader() -> "MarkdownIt":
    from markdown_it import MarkdownIt  # noqa: PLC0415 -- only an export needs it, `import carrel` does not

    return MarkdownIt("commonmark").enable("table")


def _shown(lines: list[str], tokens: "list[Token]") -> list[str]:
    closing = []
    for token in tokens:
        if token.map is None:
            continue
        first, end = token.map
        if token.type == "table_open":
            # A cell ends at its bar, and code in it does too.
            lines[first:end] = ["|".join(map(_letters, line.split("|"))) for line in lines[first:end]]
        elif token.type == "paragraph_open" or (token.type == "heading_open" and token.level > 0):
            lines[first:end] = _letters("\n".join(lines[first:end])).split("\n")
        elif token.type == "heading_open":
            if token.markup in ("=", "-"):  # underlined: written the other way, on as many lines
                level = "#" * (2 + int(token.tag[1]))
                words = _letters("\n".join(lines[first : end - 1])).split()
                lines[first:end] = [f"{level} {' '.join(words)}", *[""] * (end - first - 1)]
            else:
                lines[first] = _letters(_ATX.sub(r"\1##\2", lines[first]))
        elif token.type == "fence" and token.level == 0 and not _is_closed(lines[first:end], token.markup):
            closing.append(token.markup)
    return [*lines, *closing]


def _is_closed(block: list[str], fence: str) -> bool:
    return len(block) > 1 and bool(re.fullmatch(rf" {{0,3}}{re.escape(fence)}{re.escape(fence[0])}*[ \t]*", block[-1]))


def _letters(text: str) -> str:
    """What stands in a paragraph, with tags and pictures as letters, but not in code."""
    pieces, place, at = [], 0, 0
    while found := _INLINE.search(text, at):
        at = found.end()
        word = found[0]
        if word[0] == "`":
            # Code goes up to as many ticks; without them these are letters themselves.
            at = next((run.end() for run in _TICKS.finditer(text, at) if len(run[0]) == len(word)), at)
        elif word[0] != "\\":
            if link := _AUTOLINK.match(text, found.start()):
                at = link.end()
                continue
            pieces.append(f"{text[place : found.start()]}\\{word}")
            place = at
    return "".join([*pieces, text[place:]])


def _without_tags(line: str) -> str:
    return re.sub(r"<(?=[A-Za-z/!?])", r"\\<", line)
