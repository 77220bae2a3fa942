"""Conversations as text for people: messages, tables of sessions, token usage, search results, imports."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carrel.cli.output import Column, console, is_terminal, print_indented, print_table, print_text, safe_text, when
from carrel.conversation.export import describe_event, time_of
from carrel.conversation.messages import ConversationMessage, MessageBlock, blocks_of, meta_of, tool_result_text
from carrel.text import count_messages, count_variables, parse_time, readable_size, readable_time, single_line

if TYPE_CHECKING:
    from rich.text import Text

    import carrel
    from carrel.conversation.importers import ImportReport
    from carrel.conversation.search.search import SearchHit

MAX_INPUT = 300
"""Characters of a tool call's input without --full."""
MAX_LINES = 12
"""Lines of a tool result without --full."""
SHORTEST_ID = 8
LONGEST_ID = 20
"""Ids chosen by users are rarely longer and are never shortened."""


def short_ids(every: Iterable[str]) -> Callable[[str], str]:
    """Return a function that shortens an id, at a terminal, to a start that no other id has."""
    if not is_terminal():
        return str
    ordered = sorted(every)
    lengths: dict[str, int] = {}
    for index, id_ in enumerate(ordered):
        near = ordered[max(0, index - 1) : index] + ordered[index + 1 : index + 2]
        enough = max([SHORTEST_ID, *(_shared(id_, other) + 1 for other in near)])
        lengths[id_] = enough if len(id_) > LONGEST_ID else len(id_)
    return lambda id_: id_[: lengths.get(id_, len(id_))]


def _shared(one: str, other: str) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def print_sessions(metas: Sequence[Any], short: Callable[[str], str]) -> None:
    has_tags = any(meta.get("tags") for meta in metas)
    is_durable = any(meta.get("durable") for meta in metas)
    columns = [
        Column("ID", "cyan"),
        Column("TITLE", gives_way=True),
        Column("MESSAGES", justify="right", may_go=True),
        Column("UPDATED", "dim", may_go=True),
        Column("MODEL", "dim", may_go=True),
        *([Column("TAGS", "yellow", may_go=True)] if has_tags else []),
        *([Column("STATE"), Column("ON DISK", "dim", justify="right", may_go=True)] if is_durable else []),
    ]
    print_table(
        columns,
        [
            [
                short(meta["id"]),
                meta.get("title") or "",
                f"{meta['message_count']:,}" if "message_count" in meta else "?",
                when(meta.get("updated_at")),
                meta.get("model") or "",
                *([", ".join(map(str, meta.get("tags") or []))] if has_tags else []),
                *(_durable_cells(meta.get("durable")) if is_durable else []),
            ]
            for meta in metas
        ],
    )


def _durable_cells(state: Mapping[str, Any] | None) -> list[object]:
    return ["", ""] if state is None else [state["state"], readable_size(state["bytes"])]


def print_imports(reports: Sequence["ImportReport"], short: Callable[[str], str], *, redacted: bool) -> None:
    if not reports:
        return
    print_table(
        [
            Column("FROM", gives_way=True),
            Column("KIND", may_go=True),
            Column("LINES", justify="right", may_go=True),
            Column("IMPORTED", justify="right"),
            Column("MERGED", justify="right", may_go=True),
            Column("IGNORED", justify="right"),
            Column("UNKNOWN", justify="right"),
            Column("UNREADABLE", justify="right"),
            Column("SESSION", "cyan"),
        ],
        [
            [
                Path(report.path).name if is_terminal() else report.path,
                report.kind,
                f"{report.lines:,}",
                f"{report.imported:,}",
                f"{report.merged:,}",
                f"{sum(report.ignored.values()):,}",
                f"{sum(report.unknown.values()):,}",
                f"{len(report.unreadable):,}",
                short(report.session_id or report.already_here or ""),
            ]
            for report in reports
        ],
    )
    for report in reports:
        if report.appended:
            added = f"{report.appended:,} {'entry' if report.appended == 1 else 'entries'} added to it"
            print_text(f"{report.path}: already here as {report.already_here}; {added}")
        elif report.already_here and not report.problems:
            print_text(f"{report.path}: already here as {report.already_here}")
    reasons = {what: reason for report in reports for what, reason in report.reasons.items() if reason}
    for what, count in _summed(report.ignored for report in reports).items():
        print_text(f"ignored {count:,} × {what}" + (f": {reasons[what]}" if what in reasons else ""), "dim")
    for what, count in _summed(report.unknown for report in reports).items():
        print_text(f"unknown {count:,} × {what}: not imported", "yellow")
    for report in reports:
        if report.unreadable:
            shown = ", ".join(map(str, report.unreadable[:10]))
            print_text(f"unreadable in {report.path}: line {shown}{'…' if len(report.unreadable) > 10 else ''}", "red")
        for problem in report.problems:
            print_text(f"{report.path}: {problem}", "yellow")
        if report.with_secrets:
            print_text(f"{report.path}: {_secrets_note(report.with_secrets, redacted)}", "yellow")


def _secrets_note(messages: int, redacted: bool) -> str:
    count = f"{count_messages(messages)} with what looks like keys, tokens or passwords"
    return f"{count}: replaced" if redacted else f"{count}; --redact replaces them, here (with --again) and in exports"


def _summed(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for some in counts:
        total.update(some)
    return total


def print_usage(usage: "carrel.Usage") -> None:
    has_cost = usage.total.cost is not None
    numbers = [
        Column(title, justify="right", may_go=title.startswith("CACHE"))
        for title in ("INPUT", "OUTPUT", "CACHE READ", "CACHE WRITE", "TOTAL")
    ]
    cost = [Column("COST", justify="right")] if has_cost else []

    def row(tokens: Any) -> list[str]:
        counts = (
            tokens.input_tokens,
            tokens.output_tokens,
            tokens.cache_read_tokens,
            tokens.cache_write_tokens,
            tokens.total_tokens,
        )
        price = "" if tokens.cost is None else f"{tokens.cost:,.4f}"
        return [*(f"{count:,}" for count in counts), *([price] if has_cost else [])]

    models = [[model, *row(tokens)] for model, tokens in usage.models.items()]
    print_table([Column("MODEL", gives_way=True), *numbers, *cost], [*models, ["all", *row(usage.total)]])
    if usage.inherited_through_seq:
        print_text(
            f"Entries up to {usage.inherited_through_seq} are copies and are counted in the original session.",
            "dim",
        )
    if usage.unpriced:
        print_text(f"No price for {', '.join(usage.unpriced)}.", "yellow")


def print_hits(hits: Sequence["SearchHit"], short: Callable[[str], str]) -> None:
    for hit in hits:
        notes = [f"entry {hit.seq}" if hit.seq else "", hit.role, "" if hit.visible else "no longer visible"]
        notes += ["archived" if hit.archived else "", "found by meaning" if hit.how == "meaning" else ""]
        console().print(
            safe_text(short(hit.session_id), "cyan"),
            safe_text(single_line(hit.title), "bold"),
            safe_text("· " + " · ".join(note for note in notes if note), "dim"),
            soft_wrap=not is_terminal(),
        )
        print_indented(marked(hit))
        print_text()


def marked(hit: "SearchHit") -> "Text":
    """The snippet with the words that were asked for made to stand out."""
    text, position = safe_text(""), 0
    for start, end in sorted(hit.marks):
        text.append_text(safe_text(hit.snippet[position:start]))
        text.append_text(safe_text(hit.snippet[max(position, start) : end], "bold yellow"))
        position = max(position, end)
    return text.append_text(safe_text(hit.snippet[position:]))


def print_message(message: ConversationMessage, *, seq: int | None = None, whole: bool = False) -> None:
    """A message, or an event of the log, as people read it."""
    event = describe_event(seq or 0, message)
    if event is not None:
        print_text(_numbered(seq, f"— {event} —"), "dim")
        if message.get("role") == "compact":
            _print_blocks(blocks_of(message), whole)
        print_text()
        return
    role = str(message.get("role") or "")
    blocks = blocks_of(message)
    if role == "unreadable":
        return
    who = "Tool" if blocks and all(block.get("type") == "tool_result" for block in blocks) else role.capitalize()
    style = {"user": "bold green", "assistant": "bold cyan"}.get(role, "bold yellow")
    title = safe_text(_numbered(seq, single_line(who)), style)
    moment = time_of(message)
    if moment is not None:
        title.append(f"  {readable_time(moment.isoformat())}", style="not bold dim")
    console().print(title)
    _print_blocks(blocks, whole)
    print_text()


def _numbered(seq: int | None, text: str) -> str:
    return f"{seq}  {text}" if seq else text


def _print_blocks(blocks: Iterable[MessageBlock], whole: bool) -> None:
    for block in blocks:
        text, style = _block(block, whole)
        if text.strip():
            print_text(text.rstrip("\n"), style)


def _block(block: MessageBlock, whole: bool) -> tuple[str, str]:
    kind = block.get("type")
    match kind:
        case "text":
            return str(block.get("text") or ""), ""
        case "thinking":
            return _lines(f"thinking: {block.get('text') or ''}", whole), "dim italic"
        case "tool_use":
            given = json.dumps(block.get("input"), ensure_ascii=False, default=str)
            if not whole and len(given) > MAX_INPUT:
                given = f"{given[:MAX_INPUT]}… ({readable_size(len(given))})"
            return f"→ {single_line(block.get('name') or 'tool')} {given}", "cyan"
        case "tool_result":
            shown = block.get("display_text")
            text = shown if isinstance(shown, str) and shown.strip() else tool_result_text(block)
            outcome = "✗" if block.get("is_error") else "←"
            lines = _lines(text, whole).replace("\n", "\n  ")
            return f"{outcome} {lines or '(nothing)'}", "red" if block.get("is_error") else "dim"
        case "image" | "document":
            size = readable_size(len(str(block.get("data") or "")) * 3 // 4)
            called = f"{kind} {single_line(block.get('name') or '')}".rstrip()
            return f"[{called}, {single_line(block.get('mime_type'))}, {size}]", "yellow"
        case _:
            return _lines(f"[{single_line(kind)}] {json.dumps(block, ensure_ascii=False, default=str)}", whole), "dim"


def _lines(text: str, whole: bool) -> str:
    lines = text.rstrip().split("\n")
    if whole or len(lines) <= MAX_LINES + 1:
        return text.rstrip()
    return "\n".join([*lines[:MAX_LINES], f"… {len(lines) - MAX_LINES:,} more lines; --full shows them"])


def print_entry_line(seq: int, entry: ConversationMessage) -> None:
    """An entry of the log on one line, cut where the terminal ends."""
    text = describe_event(seq, entry) or "  ".join(_block(block, whole=False)[0] for block in blocks_of(entry))
    line = f"{seq:>6}  {single_line(entry.get('role')):<10} {single_line(text)}"
    if meta_of(entry).get("synthetic"):
        line += "  (put in by carrel)"
    console().print(
        safe_text(line), no_wrap=True, overflow="ellipsis" if is_terminal() else "ignore", crop=is_terminal()
    )


# --- traces and trees -----------------------------------------------------------------------------------------------


def print_trace(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the steps of a session; the calls that a run made are indented below it, in the order of their start."""
    ids = {line.get("id") for line in lines}
    children: dict[Any, list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: str(line.get("started_at"))):
        parent = line.get("parent")
        children.setdefault(parent if parent in ids and parent != line.get("id") else None, []).append(line)
    rows: list[list[object]] = []

    def add(parent: Any, depth: int) -> None:
        for line in children.pop(parent, ()):
            rows.append(_trace_row(line, depth))
            add(line.get("id"), depth + 1)

    add(None, 0)
    columns = [Column("TIME", "dim"), Column("SECONDS", justify="right"), Column("STEP", "cyan"), Column("OUTCOME")]
    print_table([*columns, Column("WHAT", gives_way=True)], rows)


def _trace_row(line: Mapping[str, Any], depth: int) -> list[object]:
    moment = parse_time(line.get("started_at"))
    duration = line.get("duration")
    name = str(line.get("name") or "")
    if line.get("kind") in ("resume", "pause", "close"):
        missing = ", ".join(map(str, line.get("missing") or {}))
        name = count_variables(int(line.get("variables") or 0)) + (f"; not kept: {missing}" if missing else "")
        name += f"; {line['reason']}" if line.get("reason") else ""
    problem = line.get("error")
    return [
        moment.strftime("%H:%M:%S") if moment is not None else "",
        f"{duration:.3f}" if isinstance(duration, int | float) else "",
        _indent(depth) + str(line.get("kind") or ""),
        line.get("error_type") or line.get("outcome") or "",
        f"{name}: {str(problem).strip().splitlines()[-1]}" if problem and str(problem).strip() else name,
    ]


def _indent(depth: int) -> str:
    return "│ " * (depth - 1) + "└ " if depth else ""


def family_tree(metas: Mapping[str, Any], root: str) -> list[tuple[int, Any]]:
    """Return a session and its descendants with their depths, oldest first."""
    children: dict[str, list[Any]] = {}
    for meta in sorted(metas.values(), key=lambda meta: str(meta.get("created_at"))):
        children.setdefault(str(meta.get("parent_session_id")), []).append(meta)
    family: list[tuple[int, Any]] = []

    def add(meta: Any, depth: int) -> None:
        family.append((depth, meta))
        for child in children.pop(meta["id"], ()):
            add(child, depth + 1)

    add(metas[root], 0)
    return family


def print_tree(family: Sequence[tuple[int, Any]], marked: str, short: Callable[[str], str]) -> None:
    """Print sessions by depth; the marked one has an arrow."""
    columns = [Column("SESSION", "cyan"), Column("MESSAGES", justify="right", may_go=True)]
    columns += [Column("UPDATED", "dim", may_go=True), Column("TITLE", gives_way=True)]
    rows = [
        (
            f"{_indent(depth)}{short(meta['id'])}{' ←' if meta['id'] == marked and len(family) > 1 else ''}",
            f"{meta['message_count']:,}" if "message_count" in meta else "?",
            when(meta.get("updated_at")),
            meta.get("title") or "",
        )
        for depth, meta in family
    ]
    print_table(columns, rows)
