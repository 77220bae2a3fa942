"""`carrel sessions …`: looking at what was said, and moving about in it."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import carrel
from carrel.cli.conversation_view import (
    print_entry_line,
    print_hits,
    print_imports,
    print_message,
    print_sessions,
    print_usage,
    short_ids,
)
from carrel.cli.exit_codes import TaskFailed, WrongUsage, async_command
from carrel.cli.options import confirmed, duration, prices_in
from carrel.cli.output import flush, is_terminal, plain_data, print_json, print_json_line, print_text, write_raw
from carrel.text import count_messages, escape_control_chars_in_json, readable_size, readable_time

app = typer.Typer(
    help="The conversations kept here. ID is a full id, the beginning of one, or `last`.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Id = Annotated[str, typer.Argument(metavar="ID", help="A session: its id, the beginning of it, or `last`.")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="The sessions folder (default: $CARREL_HOME/sessions).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FORMATS: tuple[Literal["jsonl", "markdown", "html"], ...] = ("jsonl", "markdown", "html")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def opened(data: Path | None) -> "carrel.SessionStore":
    if data is not None and data.exists() and not data.is_dir():
        raise WrongUsage(f"{data} is a file; --data wants the folder that holds the sessions")
    return carrel.SessionStore(data)


@app.callback(invoke_without_command=True)
def _sessions(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
@async_command
async def list_sessions(
    cwd: Annotated[str | None, typer.Option(metavar="DIR", help="Only those of this working folder.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only those with this tag; may be given again.")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Only archived ones.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Archived ones too.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most so many; 0 for all.")] = 30,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """The sessions, newest first."""
    async with opened(data) as store:
        every = await store.list_sessions()
        found = [meta for meta in every if set(tag or []) <= set(meta.get("tags") or [])]
        if cwd is not None:
            found = [meta for meta in found if meta["cwd"] == os.path.abspath(os.path.expanduser(cwd))]
        if not everything:
            found = [meta for meta in found if bool(meta.get("archived_at")) is archived]
        shown = await store.counted(found[:limit] if limit else found)
        if as_json:
            print_json(shown)
        elif not shown:
            put_away = sum(1 for meta in every if meta.get("archived_at")) if not everything and not archived else 0
            hint = f" ({put_away:,} archived; --all shows them too)" if put_away else ""
            print_text(f"No sessions in {store.data_dir}" + (f" fit{hint}." if every else " yet."))
        else:
            print_sessions(shown, short_ids(meta["id"] for meta in every))
            if len(shown) < len(found):
                print_text(f"… and {len(found) - len(shown):,} more; --limit 0 shows all", "dim")


@app.command("show")
@async_command
async def show_session(
    session: Id = "last",
    entries: Annotated[bool, typer.Option("--entries", help="The whole log, an entry a line, numbered.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Only the last so many; 0 for all.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Long tool calls and results in full.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """What was said.

    The visible conversation, or with --entries the log as it is, also what was rewound or summed up."""
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        if entries:
            await _show_entries(store, id_, limit, as_json)
            return
        loaded = await store.load_session(id_, repair=False)
        if loaded is None:
            raise carrel.SessionNotFound(f"session {id_} was deleted meanwhile")
        meta, said = loaded["session"], loaded["messages"]
        if as_json:
            print_json({**loaded, "messages": said[-limit:] if limit else said})
            return
        facts = [
            id_,
            meta.get("model"),
            meta.get("cwd"),
            count_messages(len(said)),
            readable_time(meta.get("updated_at")),
        ]
        print_text(meta["title"], "bold")
        print_text(" · ".join(str(fact) for fact in facts if fact) + "\n", "dim")
        if limit and len(said) > limit:
            print_text(f"… {count_messages(len(said) - limit)} before\n", "dim")
        for message in said[-limit:] if limit else said:
            print_message(message, whole=full)


async def _show_entries(store: "carrel.SessionStore", id_: str, limit: int, as_json: bool) -> None:
    first = max(1, await store.last_seq(id_) - limit + 1) if limit else 1
    async for seq, entry in store.iter_entries(id_, first):
        if as_json:
            print_json_line({"seq": seq, "entry": entry})
        else:
            print_entry_line(seq, entry)


@app.command("tail")
@async_command
async def tail(
    session: Id = "last",
    from_seq: Annotated[int | None, typer.Option(min=1, help="Begin with this entry (default: the last ten).")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Stay and print what is added.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Long tool calls and results in full.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """The log as it grows, from any process; Ctrl-C ends it."""
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        first = from_seq or max(1, await store.last_seq(id_) - 9)
        try:
            async for seq, entry in store.tail(id_, first) if follow else store.iter_entries(id_, first):
                if as_json:
                    print_json_line({"seq": seq, "entry": entry})
                else:
                    print_message(entry, seq=seq, whole=full)
                    flush()
        except asyncio.CancelledError:
            # Ctrl-C is how one stops looking; it is no failure.
            return


@app.command("search")
@async_command
async def search(
    query: Annotated[list[str], typer.Argument(metavar="WORDS", help="What was said, in these words or in others.")],
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 10,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Find what was said, over all sessions."""
    async with opened(data) as store:
        hits = await store.search(" ".join(query), limit)
        if as_json:
            print_json([plain_data(hit) for hit in hits])
        elif hits:
            print_hits(hits, short_ids(meta["id"] for meta in await store.list_sessions()))
        else:
            print_text("Nothing found.")


@app.command("fork")
@async_command
async def fork(
    session: Id,
    at: Annotated[int | None, typer.Option(metavar="SEQ", help="Only up to this entry (default: all).")] = None,
    title: Annotated[str | None, typer.Option(help="The title of the new session.")] = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """A new session that begins with what was said here."""
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        made = (await store.fork_session(id_, at, title=title, load=False))["session"]
        if as_json:
            print_json(made)
        else:
            print_text(f"Forked {id_}: {made['id']} has {count_messages(made['message_count'])}.")


@app.command("rewind")
@async_command
async def rewind(
    session: Id,
    to: Annotated[int | None, typer.Option(metavar="N", help="Back to the first N messages.")] = None,
    to_seq: Annotated[int | None, typer.Option(metavar="SEQ", help="Back to right after this entry.")] = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Go back in the conversation. The log keeps everything, so this can be undone with --to-seq."""
    if (to is None) == (to_seq is None):
        raise WrongUsage("say where to: --to N (a number of messages) or --to-seq SEQ (an entry), one of them")
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        seq = await store.append_rewind(id_, to, to_seq=to_seq)
        loaded = await store.load_session(id_, repair=False)
        left = len(loaded["messages"]) if loaded else 0
        if as_json:
            print_json({"session_id": id_, "seq": seq, "visible_messages": left, "undo_to_seq": seq - 1})
        else:
            print_text(
                f"Rewound: {count_messages(left)} visible. `carrel sessions rewind {id_} --to-seq {seq - 1}` undoes it."
            )


@app.command("label")
@async_command
async def label(
    session: Id,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The label.")],
    at: Annotated[int | None, typer.Option(metavar="SEQ", help="The entry (default: the last).")] = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Give an entry a name; prune keeps sessions that have one."""
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        seq = await store.label(id_, text, at)
        if as_json:
            print_json({"session_id": id_, "text": text, "at_seq": seq})
        else:
            print_text(f"Labelled entry {seq} of {id_}: {text}")


@app.command("tag")
@async_command
async def tag(
    session: Id,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take these off instead.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Add tags, take them off, or print them."""
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        has = set((await store.read_meta(id_)).get("tags") or [])
        wanted = has - set(tags or []) if remove else has | set(tags or [])
        if wanted != has:
            await store.set_tags(id_, wanted)
        if as_json:
            print_json({"session_id": id_, "tags": sorted(wanted)})
        else:
            print_text(f"{id_} is tagged {', '.join(sorted(wanted))}." if wanted else f"{id_} has no tags.")


@app.command("rename")
@async_command
async def rename(
    session: Id,
    title: Annotated[str, typer.Argument(metavar="TITLE", help="The new title.")],
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Give a session another title."""
    async with opened(data) as store:
        _tell(await store.rename(await store.resolve_id(session), title), f"is now called {title}.", as_json)


@app.command("archive")
@async_command
async def archive(session: Id, data: Data = None, as_json: Json = False) -> None:
    """Put a session out of the way of `list`; nothing of it is lost."""
    async with opened(data) as store:
        _tell(await store.archive(await store.resolve_id(session)), "is archived.", as_json)


@app.command("unarchive")
@async_command
async def unarchive(session: Id, data: Data = None, as_json: Json = False) -> None:
    """Bring an archived session back into `list`."""
    async with opened(data) as store:
        _tell(await store.unarchive(await store.resolve_id(session)), "is no longer archived.", as_json)


def _tell(meta: Any, what: str, as_json: bool) -> None:
    if as_json:
        print_json(meta)
    else:
        print_text(f"{meta['id']} {what}")


@app.command("delete")
@async_command
async def delete(
    sessions: Annotated[list[str], typer.Argument(metavar="ID...", help="The sessions to delete.")],
    yes: Yes = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Delete sessions with all that belongs to them. This cannot be undone."""
    async with opened(data) as store:
        ids = list(dict.fromkeys([await store.resolve_id(session, traces=True) for session in sessions]))
        traced = {meta["id"]: meta for meta in await store.traces()}
        metas = [traced.get(id_) or await store.read_meta(id_, counts=not yes) for id_ in ids]
        if not yes:
            if not as_json:
                print_sessions(metas, short_ids([]))
            confirmed(f"Delete {'this session' if len(ids) == 1 else f'these {len(ids)} sessions'} for ever?")
        deleted = [id_ for id_ in ids if await store.delete_session(id_)]
        if as_json:
            print_json({"deleted": deleted})
        else:
            print_text(f"Deleted {', '.join(deleted)}.")


@app.command("prune")
@async_command
async def prune(
    older_than: Annotated[str, typer.Option(metavar="AGE", help="12h, 30d or 8w.")],
    labelled: Annotated[bool, typer.Option("--labelled", help="Sessions with a label too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete them; without it they are only listed.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Delete sessions not written to for long.

    Without --yes it only says which. Sessions with a label stay, unless --labelled; those of a newer carrel do."""
    age = duration(older_than)
    async with opened(data) as store:
        # Counted while they are there.
        chosen = await store.counted(await store.prune(age, keep_labelled=not labelled))
        if yes:
            counted = {meta["id"]: meta for meta in chosen}
            deleted = await store.prune(age, keep_labelled=not labelled, dry_run=False)
            chosen = [counted.get(meta["id"], meta) for meta in deleted]
        if as_json:
            print_json({"deleted": yes, "sessions": chosen})
        elif not chosen:
            print_text("No session is that old.")
        else:
            print_sessions(chosen, short_ids([]))
            count = "1 session" if len(chosen) == 1 else f"{len(chosen):,} sessions"
            print_text(f"Deleted {count}." if yes else f"{count} would be deleted; --yes does it.")


@app.command("export")
@async_command
async def export(
    session: Id,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", metavar="jsonl|markdown|html", help="Default: by the name of OUTPUT, else jsonl."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file (default: standard output).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """The session as JSON lines, as Markdown, or as one page of HTML."""
    named = format_ or {".html": "html", ".htm": "html", ".md": "markdown"}.get(
        output.suffix if output else "", "jsonl"
    )
    chosen = next((known for known in FORMATS if known == named), None)
    if chosen is None:
        raise WrongUsage(f"--format is jsonl, markdown or html, not {named!r}")
    if output is not None and output.exists() and not force:
        raise WrongUsage(f"{output} is there already; --force overwrites it")
    if output is None and as_json:
        raise WrongUsage("--json tells what was written; it needs --output")
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        pieces = store.export_lines(id_) if chosen == "jsonl" else _alone(await store.export(id_, chosen))
        if output is None:
            harmless = escape_control_chars_in_json if chosen == "jsonl" and is_terminal() else str
            async for piece in pieces:
                write_raw(harmless(piece))
            return
        size = await _written(output, pieces)
    if as_json:
        print_json({"session_id": id_, "format": chosen, "path": str(output.absolute()), "bytes": size})
    else:
        print_text(f"Wrote {output} ({readable_size(size)}).")


async def _alone(text: str) -> AsyncIterator[str]:
    yield text


async def _written(path: Path, pieces: AsyncIterator[str]) -> int:
    """Write all of it or leave what was there: first beside it, then in its place. A device or a pipe stays one."""
    if not path.parent.is_dir():
        raise WrongUsage(f"there is no folder {path.parent}")
    if path.is_dir():
        raise WrongUsage(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        return await _written_to(path, pieces)
    path = path.resolve()
    beside = path.with_name(f".{path.name[:40]}.{os.urandom(4).hex()}.part")
    try:
        size = await _written_to(beside, pieces)
        beside.replace(path)
    except carrel.StorageError:
        raise
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)
    return size


async def _written_to(path: Path, pieces: AsyncIterator[str]) -> int:
    size = 0
    with path.open("wb") as file:
        async for piece in pieces:
            size += file.write(piece.encode())
    return size


@app.command("import")
@async_command
async def import_(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Session files, or folders of them.")],
    all_branches: Annotated[
        bool, typer.Option("--all-branches", help="Also the branches that a conversation went back from, as sessions.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Also what was imported before, as other sessions.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Bring in sessions of other agents.

    Claude Code, Codex, pi, Mistral Vibe (and other OpenAI Chat messages), and folders of this format. What a file has
    that we do not know is counted and named. What was imported before is here already; what its file has got since is
    added to it."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise WrongUsage(f"there is no {missing[0]}")
    reports, refused = [], []
    async with opened(data) as store:
        for path in paths:
            try:
                reports += await store.import_file(path, all_branches=all_branches, again=again)
            except carrel.ImportRefused as problem:
                refused.append(f"{path}: {problem}" if str(path) not in str(problem) else str(problem))
        every = [meta["id"] for meta in await store.list_sessions()]
    if as_json:
        print_json({"imports": [plain_data(report) for report in reports], "refused": refused})
    else:
        print_imports(reports, short_ids(every))
    stored = [report for report in reports if report.session_id or (report.already_here and not report.problems)]
    refused += [f"{report.path}: {report.refused}" for report in reports if report.refused]
    if refused:
        raise TaskFailed("; ".join(refused))
    if not stored:
        raise TaskFailed("nothing was imported")


@app.command("usage")
@async_command
async def usage(
    session: Id = "last",
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON: {"MODEL": {"input": 3, "output": 15}}, per million tokens.'),
    ] = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Tokens per model and per turn, and with prices what they cost. A fork counts only its own."""
    table = prices_in(prices) if prices is not None else None
    async with opened(data) as store:
        spent = await store.usage(await store.resolve_id(session), table)
        if as_json:
            print_json(spent.model_dump())
        else:
            print_usage(spent)


@app.command("children")
@async_command
async def children(session: Id = "last", data: Data = None, as_json: Json = False) -> None:
    """The sessions that were begun or forked from this one."""
    async with opened(data) as store:
        id_ = await store.resolve_id(session)
        found = [await store.read_meta(meta["id"], counts=True) for meta in await store.children(id_)]
        if as_json:
            print_json(found)
        elif found:
            print_sessions(found, short_ids(meta["id"] for meta in await store.list_sessions()))
        else:
            print_text(f"{id_} has no children.")
