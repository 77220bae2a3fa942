"""Compact a conversation: when to do it, where to cut, a report of what is removed, and the entry in the log."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from carrel.conversation.log_entries import build_compact_event
from carrel.conversation.log_reader import SessionLogReader
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    blocks_of,
    flatten_message_text,
    meta_of,
    tool_calls_of,
    tool_result_text,
    tool_results_of,
)
from carrel.conversation.replay import FILES, Numbered, repair_messages
from carrel.conversation.repository import SessionRepository
from carrel.errors import CompactRefused, ConfigurationError

Summarize = Callable[[list[ConversationMessage]], Awaitable[Any]]

DEFAULT_COMPACT_THRESHOLD = 0.8

COMPACT_SUMMARY_PROMPT = """\
The conversation above is about to leave your context. Write the notes with which you, or a reader who has seen \
nothing of it, can go on with the work as if nothing had been lost.

Write these parts, each under its own heading, and leave out a part that would be empty:

1. Requested: every request and constraint of the user, in order, in the user's own words where the wording matters.
2. Done: what was finished, with the exact names of files, functions and commands, and what each change was for.
3. Found out: facts about the project, the machine and the problem that took effort to learn, errors seen with their \
exact text, and what turned out not to work and why.
4. Decided: choices made and the reasons given, so that they are not reopened by accident.
5. Where things stand: what works, what does not, what was half done, which checks were run and with what result.
6. Next: the steps that remain, first the one that was under way.

State facts only; keep names, numbers and quotations exact; add no advice of your own. Be as short as that allows.\
"""

IMAGE_TOKENS = 1500
"""The assumed number of tokens of an image or of a page of a document."""


def should_compact(
    last_usage: dict[str, Any] | None,
    context_window: int | None,
    threshold: float | None = DEFAULT_COMPACT_THRESHOLD,
    *,
    request_bytes: int | None = None,
    byte_limit: int | None = None,
) -> bool:
    """Return whether the last request nearly filled the model's window, or the next nearly has the provider's limit.

    Images can exceed a provider's request size long before its window: give `request_bytes` and `byte_limit` too."""
    if not threshold or threshold <= 0:
        return False
    if request_bytes and byte_limit and request_bytes >= byte_limit * threshold:
        return True
    if not last_usage or not context_window:
        return False
    return _input_tokens(last_usage) >= context_window * threshold


def _input_tokens(usage: dict[str, Any]) -> int:
    for name in ("input_tokens", "prompt_tokens", "prompt_token_count"):
        value = usage.get(name)
        if isinstance(value, int | float) and value:
            return int(value)
    return 0


def estimate_tokens(message: ConversationMessage) -> int:
    """Estimate the tokens of a message: one for four bytes of text, a fixed number for an image."""
    total = 4
    for block in blocks_of(message):
        kind = block.get("type")
        if kind in ("image", "document"):
            total += IMAGE_TOKENS
        elif kind == "tool_result":
            total += _size(tool_result_text(block)) // 4
            content = block.get("content")
            total += sum(
                IMAGE_TOKENS
                for part in (content if isinstance(content, list) else [])
                if isinstance(part, dict) and part.get("type") in ("image", "document")
            )
        elif kind == "tool_use":
            total += (_size(str(block.get("name"))) + _size(str(block.get("input")))) // 4
        else:
            total += _size(str(block.get("text") or "")) // 4
    return total


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def estimate_bytes(messages: Sequence[ConversationMessage]) -> int:
    """Estimate the bytes of a request with these messages, with images in base64; for `should_compact`."""
    return sum(_size(str(_sent(block))) for message in messages for block in blocks_of(message))


def _sent(block: MessageBlock) -> MessageBlock:
    """Return the part of a block that is sent to the model: not the display text of a result, for example."""
    if block.get("type") != "tool_result":
        return block
    unsent = ("display_text", "model_text") if isinstance(block.get("content"), list) else ("display_text",)
    return {key: value for key, value in block.items() if key not in unsent}


class Cut(NamedTuple):
    summarized: list[Numbered]
    kept: list[Numbered]


def choose_cut(shown: Sequence[Numbered], *, keep_tokens: int = 20_000, keep_turns: int | None = None) -> Cut:
    """Divide what is visible into messages to summarize and to keep; a tool call and its result stay together.

    `keep_turns` counts user messages from the end and takes precedence over `keep_tokens`. `CompactRefused` if
    nothing would be summarized that is not a summary already."""
    _checked_count("keep_tokens", keep_tokens)
    if keep_turns is not None:
        _checked_count("keep_turns", keep_turns)
    places = _places(shown)
    if keep_turns is not None:
        turns = [place for place in places if _opens_turn(shown, place)]
        cut = turns[-keep_turns] if 0 < keep_turns <= len(turns) else (0 if keep_turns else len(shown))
    else:
        cut = _cut_by_tokens(shown, places, keep_tokens)
    summarized = list(shown[:cut])
    if not any(seq for seq, _ in summarized):
        raise CompactRefused("there is nothing to compact: everything visible would be kept, or is a summary already")
    return Cut(summarized, list(shown[cut:]))


def _checked_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ConfigurationError(f"{name} must be an integer of 0 or more, not {value!r:.60}; nothing was written")


def _places(shown: Sequence[Numbered]) -> list[int]:
    """Return where the list may be cut: not between a call and its result, and not so that a summary is kept."""
    places: list[int] = []
    waiting: set[str] = set()
    for index, (seq, message) in enumerate(shown):
        if not waiting and seq:
            places.append(index)
        waiting.update(tool_calls_of(message))
        waiting.difference_update(tool_results_of(message))
    if not waiting:
        places.append(len(shown))
    return places


def _opens_turn(shown: Sequence[Numbered], place: int) -> bool:
    return place < len(shown) and shown[place][1].get("role") == "user" and not tool_results_of(shown[place][1])


def _cut_by_tokens(shown: Sequence[Numbered], places: Sequence[int], keep_tokens: int) -> int:
    sums = [0] * (len(shown) + 1)
    for index in range(len(shown) - 1, -1, -1):
        sums[index] = sums[index + 1] + estimate_tokens(shown[index][1])
    fitting = [place for place in places if sums[place] <= keep_tokens]
    if not fitting:
        return places[-1] if places else 0
    opening = [place for place in fitting if _opens_turn(shown, place)]
    return opening[0] if opening else fitting[0]


def report_of(summarized: Sequence[Numbered]) -> dict[str, Any]:
    """Report what leaves the context: counts, tools by name, and the files that calls named."""
    tools: dict[str, int] = {}
    files: dict[str, None] = {}
    for _, message in summarized:
        for block in blocks_of(message):
            if block.get("type") == "tool_use":
                tools[str(block.get("name"))] = tools.get(str(block.get("name")), 0) + 1
                files |= dict.fromkeys(_named_files(block.get("input")))
    messages = [message for _, message in summarized]
    return {
        "messages": sum(1 for seq, _ in summarized if seq),
        "tool_calls": sum(tools.values()),
        "tools": tools,
        "files": list(files)[:200],
        "tokens": sum(map(estimate_tokens, messages)),
        "bytes": estimate_bytes(messages),
    }


def _named_files(arguments: Any) -> list[str]:
    if not isinstance(arguments, dict):
        return []
    names = ("path", "file_path", "file", "filename", "notebook_path", "target_file")
    return [arguments[name] for name in names if isinstance(arguments.get(name), str)]


def pinned_text(pinned: Sequence[Numbered]) -> str:
    """Return the text of pinned messages, which is added to the summary so that every reader of the log has it."""
    if not pinned:
        return ""
    quotes = [f"[{message.get('role')}, entry {seq}]\n{_words(message)}" for seq, message in pinned]
    return "\n\n## Pinned, word for word\n\n" + "\n\n".join(quotes)


def _words(message: ConversationMessage) -> str:
    blocks = blocks_of(message)
    texts = [str(block.get("text") or "").strip() for block in blocks if block.get("type") == "text"]
    results = [tool_result_text(block) for block in blocks if block.get("type") == "tool_result"]
    return "\n".join(part for part in [" ".join(filter(None, texts)), *results] if part)


def pinned_files(pinned: Sequence[Numbered]) -> list[MessageBlock]:
    """Return the images and documents of pinned messages, also those in tool results, each once."""
    files: list[MessageBlock] = []
    for _, message in pinned:
        for block in blocks_of(message):
            inner = blocks_of(block) if block.get("type") == "tool_result" else []
            files += [part for part in (block, *inner) if part.get("type") in FILES and part not in files]
    return files


def summary_and_usage(answer: Any) -> tuple[str, Any]:
    """Parse the result of a summarizing function: a text, a text with its usage, or an assistant message."""
    if isinstance(answer, dict):
        answer = (flatten_message_text(answer, include_thinking=False), meta_of(answer).get("usage"))
    text, usage = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not isinstance(text, str) or not text.strip():
        raise CompactRefused("the summary is empty; nothing was written")
    return text.strip(), usage


async def compact(
    logs: SessionRepository,
    session_id: str,
    summarize: Summarize,
    *,
    keep_tokens: int,
    keep_turns: int | None,
    provider: str | None,
    model: str | None,
    now: Callable[[], str],
) -> tuple[int, ConversationMessage]:
    """Write the entry and return it with its number; `CompactRefused` if the conversation was changed meanwhile."""
    view = await logs.view(session_id)
    reading = logs.reader(session_id)
    # Measured as the model gets them, with their attachments.
    whole = await reading.whole(view)
    shown = list(zip(view.shown.seqs(), whole, strict=True))
    cut = choose_cut(shown, keep_tokens=keep_tokens, keep_turns=keep_turns)
    leaving = [message for _, message in cut.summarized]
    text, usage = summary_and_usage(await summarize(repair_messages(leaving).messages))
    meta = await logs.require_meta(session_id)
    # Also if nothing is kept: messages that are appended while the summary is written come after it.
    keep_from = cut.kept[0][0] if cut.kept else view.last_seq + 1
    pinned = await _pinned(reading, [seq for seq in meta.get("pins", []) if seq < keep_from])
    event = build_compact_event(
        text + pinned_text(pinned),
        provider=provider or meta["provider"],
        model=model or meta["model"],
        compacted_count=len(cut.summarized),
        usage=usage,
    )
    event["content"] += pinned_files(pinned)
    event["meta"] |= {"keep_from_seq": keep_from, "created_at": now(), "report": report_of(cut.summarized)}
    seq = await logs.append_if_unchanged(session_id, event, since=view.last_seq)
    if not seq:
        raise CompactRefused(
            f"session {session_id} was changed meanwhile: another writer rewound or compacted it while the "
            "summary was being written; nothing was written, because the summary may contain removed messages"
        )
    return seq, event


async def _pinned(reading: SessionLogReader, pins: list[int]) -> list[Numbered]:
    """Return the pinned messages that are still visible or summarized, with their attachments."""
    if not pins:
        return []
    runs = [piece for piece in (await reading.visible_range(summed=True)).shown.pieces if isinstance(piece, range)]
    return await reading.read_entries(seq for seq in pins if any(seq in run for run in runs))
