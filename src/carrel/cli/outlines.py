"""The tables of `carrel sessions`: which columns, in which order."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carrel.cli.show import Column, console, is_terminal, print_indented, print_table, say, when, words
from carrel.text import single_line

if TYPE_CHECKING:
    from rich.text import Text

    import carrel
    from carrel.conversation.importers import ImportReport
    from carrel.conversation.search.search import SearchHit

SHORTEST_ID = 8
LONGEST_ID = 20
"""An id that somebody chose is rarely longer, and is shown as it is."""


def short_ids(every: Iterable[str]) -> Callable[[str], str]:
    """At a terminal, as much of an id as tells it from all others; in a pipe, and for one not among them, all of it."""
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
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def print_sessions(metas: Sequence[Any], short: Callable[[str], str]) -> None:
    has_tags = any(meta.get("tags") for meta in metas)
    columns = [
        Column("ID", "cyan"),
        Column("TITLE", gives_way=True),
        Column("MESSAGES", justify="right", may_go=True),
        Column("UPDATED", "dim", may_go=True),
        Column("MODEL", "dim", may_go=True),
        *([Column("TAGS", "yellow", may_go=True)] if has_tags else []),
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
            ]
            for meta in metas
        ],
    )


def print_imports(reports: Sequence["ImportReport"], short: Callable[[str], str]) -> None:
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
            say(f"{report.path}: already here as {report.already_here}; {added}")
        elif report.already_here and not report.problems:
            say(f"{report.path}: already here as {report.already_here}")
    reasons = {what: reason for report in reports for what, reason in report.reasons.items() if reason}
    for what, count in _summed(report.ignored for report in reports).items():
        say(f"ignored {count:,} × {what}" + (f": {reasons[what]}" if what in reasons else ""), "dim")
    for what, count in _summed(report.unknown for report in reports).items():
        say(f"unknown {count:,} × {what}: kept out, and left in the file", "yellow")
    for report in reports:
        if report.unreadable:
            shown = ", ".join(map(str, report.unreadable[:10]))
            say(f"unreadable in {report.path}: line {shown}{'…' if len(report.unreadable) > 10 else ''}", "red")
        for problem in report.problems:
            say(f"{report.path}: {problem}", "yellow")


def _summed(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for some in counts:
        total.update(some)
    return total


def print_usage(spent: "carrel.Usage") -> None:
    has_cost = spent.total.cost is not None
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

    models = [[model, *row(tokens)] for model, tokens in spent.models.items()]
    print_table([Column("MODEL", gives_way=True), *numbers, *cost], [*models, ["all", *row(spent.total)]])
    if spent.inherited_through_seq:
        say(
            f"Entries up to {spent.inherited_through_seq} came with the fork and are counted where they were made.",
            "dim",
        )
    if spent.unpriced:
        say(f"No price for {', '.join(spent.unpriced)}.", "yellow")


def print_hits(hits: Sequence["SearchHit"], short: Callable[[str], str]) -> None:
    for hit in hits:
        notes = [f"entry {hit.seq}" if hit.seq else "", hit.role, "" if hit.visible else "no longer visible"]
        notes += ["archived" if hit.archived else "", "found by meaning" if hit.how == "meaning" else ""]
        console().print(
            words(short(hit.session_id), "cyan"),
            words(single_line(hit.title), "bold"),
            words("· " + " · ".join(note for note in notes if note), "dim"),
            soft_wrap=not is_terminal(),
        )
        print_indented(marked(hit))
        say()


def marked(hit: "SearchHit") -> "Text":
    """The snippet with the words that were asked for made to stand out."""
    text, place = words(""), 0
    for start, end in sorted(hit.marks):
        text.append_text(words(hit.snippet[place:start]))
        text.append_text(words(hit.snippet[max(place, start) : end], "bold yellow"))
        place = max(place, end)
    return text.append_text(words(hit.snippet[place:]))
