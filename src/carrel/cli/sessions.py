"""`carrel sessions …`: look at conversations, change and copy them."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import carrel
from carrel.cli.conversation_view import (
    family_tree,
    print_entry_line,
    print_hits,
    print_message,
    print_sessions,
    print_trace,
    print_tree,
    print_usage,
    short_ids,
)
from carrel.cli.exit_codes import WrongUsage
from carrel.cli.options import (
    CONVERSATIONS,
    Base,
    Id,
    Json,
    Limit,
    OlderThan,
    Timeout,
    Yes,
    command,
    confirm,
    group,
    open_store,
    parse_age,
    read_json,
)
from carrel.cli.output import (
    flush,
    plain_data,
    print_answer,
    print_json,
    print_json_line,
    print_text,
)
from carrel.cli.session_files import export_session, import_sessions
from carrel.cli.session_states import SessionStates, print_state, unsaid_meta, with_states
from carrel.errors import SandboxUnavailable, SessionBusy
from carrel.storage.files.store import FileStore
from carrel.text import count_messages, readable_time
from carrel.tracing import TraceLog

app = group(
    "sessions",
    "Look at conversations, change and copy them. ID is a full id, the start of one, or `last`.",
    panel=CONVERSATIONS,
    example="carrel sessions show last",
)
LOOK, CHANGE, COPY = "Look", "Change", "Copy"

Full = Annotated[bool, typer.Option("--full", help="Show long tool calls and results in full.")]


@command(app, "list", panel=LOOK, example="carrel sessions list --limit 5")
async def list_sessions(
    cwd: Annotated[str | None, typer.Option(metavar="DIR", help="Only sessions with this working folder.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Only sessions with this tag; may be repeated.")
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Only archived sessions.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Archived sessions too.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Maximum number to show; 0 for all.")] = 30,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Show the sessions, newest first."""
    async with open_store(base) as store:
        states = await SessionStates(store).all()
        every: list[Any] = list(await store.list_sessions())
        if not (cwd or tag or archived):
            every += [unsaid_meta(id_, states[id_]) for id_ in states.keys() - {meta["id"] for meta in every}]
            every.sort(key=lambda meta: str(meta.get("updated_at")), reverse=True)
        found = [meta for meta in every if set(tag or []) <= set(meta.get("tags") or [])]
        if cwd is not None:
            found = [meta for meta in found if meta["cwd"] == os.path.abspath(os.path.expanduser(cwd))]
        if not everything:
            found = [meta for meta in found if bool(meta.get("archived_at")) is archived]
        shown = await with_states(store, found[:limit] if limit else found, states)
        if as_json:
            print_json(shown)
        elif not shown:
            hidden = 0 if everything or archived else sum(1 for meta in every if meta.get("archived_at"))
            hint = f" ({hidden:,} archived; --all shows them too)" if hidden else ""
            print_text(f"No sessions in {store.data_dir}" + (f" match{hint}." if every else " yet."))
        else:
            print_sessions(shown, short_ids(meta["id"] for meta in every))
            if len(shown) < len(found):
                print_text(f"… and {len(found) - len(shown):,} more; --limit 0 shows all", "dim")


@command(app, "show", panel=LOOK, example="carrel sessions show last --limit 2")
async def show_session(
    session: Id = "last",
    entries: Annotated[bool, typer.Option("--entries", help="Show the log, one line for each entry.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Only the last N messages; 0 for all.", metavar="N")] = 0,
    full: Full = False,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Show a conversation.

    With --entries, its whole log, which includes what was rewound or summarized."""
    async with open_store(base) as store:
        id_ = await store.resolve_id(session, traces=True)
        state = await SessionStates(store).find(id_)
        if state is None:
            id_ = await store.resolve_id(session)
        if entries:
            await _show_entries(store, id_, limit, as_json)
            return
        loaded = await store.load_session(id_, repair=False)
        if loaded is None and state is not None:
            if as_json:
                print_json({"session": unsaid_meta(id_, state), "messages": [], "durable": state.as_json()})
            else:
                print_text(id_, "bold")
                print_state(state)
            return
        if loaded is None:
            raise carrel.SessionNotFound(f"session {id_} was deleted in the meantime")
        meta, messages = loaded["session"], loaded["messages"]
        if as_json:
            kept = {"durable": state.as_json()} if state is not None else {}
            print_json({**loaded, "messages": messages[-limit:] if limit else messages, **kept})
            return
        facts = [
            id_,
            meta.get("model"),
            meta.get("cwd"),
            count_messages(len(messages)),
            readable_time(meta.get("updated_at")),
        ]
        print_text(meta["title"], "bold")
        print_text(" · ".join(str(fact) for fact in facts if fact) + ("" if state else "\n"), "dim")
        if state is not None:
            print_state(state)
        if limit and len(messages) > limit:
            print_text(f"… {count_messages(len(messages) - limit)} before\n", "dim")
        for message in messages[-limit:] if limit else messages:
            print_message(message, whole=full)


async def _show_entries(store: "carrel.SessionStore", id_: str, limit: int, as_json: bool) -> None:
    first = max(1, await store.last_seq(id_) - limit + 1) if limit else 1
    async for seq, entry in store.iter_entries(id_, first):
        if as_json:
            print_json_line({"seq": seq, "entry": entry})
        else:
            print_entry_line(seq, entry)


@command(app, "tail", panel=LOOK, example="carrel sessions tail stars --no-follow")
async def tail(
    session: Id = "last",
    from_seq: Annotated[
        int | None, typer.Option(metavar="SEQ", min=1, help="Start with this entry. Default: the last ten.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for new entries.")] = True,
    full: Full = False,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Print the newest entries and then each new one, until Ctrl-C."""
    async with open_store(base) as store:
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
            # Ctrl-C is the normal end of this command.
            return


@command(app, "search", panel=LOOK, example="carrel sessions search twinkling")
async def search(
    query: Annotated[list[str], typer.Argument(metavar="WORDS", help="What to search for, in these or other words.")],
    limit: Limit = 10,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Search all conversations, by words and by meaning."""
    async with open_store(base) as store:
        hits = await store.search(" ".join(query), limit)
        if as_json:
            print_json([plain_data(hit) for hit in hits])
        elif hits:
            print_hits(hits, short_ids(meta["id"] for meta in await store.list_sessions()))
        else:
            print_text("Nothing found.")


@command(app, "fork", panel=COPY, example='carrel sessions fork stars --at 2 --title "The moon instead"')
async def fork(
    session: Id,
    at: Annotated[int | None, typer.Option(metavar="SEQ", help="Copy entries up to this one. Default: all.")] = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the new session.")] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Start a new session with a copy of a conversation."""
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        made = (await store.fork_session(id_, at, title=title, load=False))["session"]
        print_answer(as_json, made, f"Forked {id_}: {made['id']} has {count_messages(made['message_count'])}.")


@command(app, "rewind", panel=CHANGE, example="carrel sessions rewind stars --to 2")
async def rewind(
    session: Id,
    to: Annotated[int | None, typer.Option(metavar="N", help="Number of messages to keep.")] = None,
    to_seq: Annotated[int | None, typer.Option(metavar="SEQ", help="Entry to return to.")] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Return to an earlier point of a conversation.

    The log keeps everything, so --to-seq can undo it."""
    if (to is None) == (to_seq is None):
        raise WrongUsage("give either --to N (a number of messages) or --to-seq SEQ (an entry)")
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        seq = await store.append_rewind(id_, to, to_seq=to_seq)
        loaded = await store.load_session(id_, repair=False)
        left = len(loaded["messages"]) if loaded else 0
        print_answer(
            as_json,
            {"session_id": id_, "seq": seq, "visible_messages": left, "undo_to_seq": seq - 1},
            f"Rewound: {count_messages(left)} visible. `carrel sessions rewind {id_} --to-seq {seq - 1}` undoes it.",
        )


@command(app, "label", panel=CHANGE, example='carrel sessions label stars "before the planets" --at 2')
async def label(
    session: Id,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The label.")],
    at: Annotated[int | None, typer.Option(metavar="SEQ", help="The entry. Default: the last.")] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Label an entry; prune keeps sessions with labels."""
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        seq = await store.label(id_, text, at)
        print_answer(
            as_json, {"session_id": id_, "text": text, "at_seq": seq}, f"Labelled entry {seq} of {id_}: {text}"
        )


@command(app, "tag", panel=CHANGE, example="carrel sessions tag stars astronomy")
async def tag(
    session: Id,
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG", help="Tags to add.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove these tags instead.")] = False,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Add tags, remove them, or print them."""
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        has = set((await store.read_meta(id_)).get("tags") or [])
        wanted = has - set(tags or []) if remove else has | set(tags or [])
        if wanted != has:
            await store.set_tags(id_, wanted)
        print_answer(
            as_json,
            {"session_id": id_, "tags": sorted(wanted)},
            f"{id_} is tagged {', '.join(sorted(wanted))}." if wanted else f"{id_} has no tags.",
        )


@command(app, "rename", panel=CHANGE, example='carrel sessions rename stars "Stars and planets"')
async def rename(
    session: Id,
    title: Annotated[str, typer.Argument(metavar="TITLE", help="The new title.")],
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Change the title of a session."""
    async with open_store(base) as store:
        _print_change(
            await store.rename(await store.resolve_id(session), title), f"has the new title {title}.", as_json
        )


@command(app, "archive", panel=CHANGE, example="carrel sessions archive stars")
async def archive(session: Id, base: Base = None, as_json: Json = False) -> None:
    """Hide a session from `list`; nothing is deleted."""
    async with open_store(base) as store:
        _print_change(await store.archive(await store.resolve_id(session)), "is archived.", as_json)


@command(app, "unarchive", panel=CHANGE, example="carrel sessions unarchive stars")
async def unarchive(session: Id, base: Base = None, as_json: Json = False) -> None:
    """Show an archived session in `list` again."""
    async with open_store(base) as store:
        _print_change(await store.unarchive(await store.resolve_id(session)), "is no longer archived.", as_json)


def _print_change(meta: Any, what: str, as_json: bool) -> None:
    print_answer(as_json, meta, f"{meta['id']} {what}")


@command(app, "delete", panel=CHANGE, example="carrel sessions delete stars --yes")
async def delete(
    sessions: Annotated[list[str], typer.Argument(metavar="ID", help="The sessions to delete.")],
    yes: Yes = False,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Delete sessions with all their data. This cannot be undone."""
    async with open_store(base) as store:
        ids = list(dict.fromkeys([await store.resolve_id(session, traces=True) for session in sessions]))
        states = SessionStates(store)
        for id_ in ids:
            await states.check_closed(id_)
        durable = {id_: unsaid_meta(id_, state) for id_, state in (await states.all()).items()}
        traced: dict[str, Any] = {meta["id"]: meta for meta in await store.traces()}
        traced |= {id_: meta for id_, meta in durable.items() if await store.find_meta(id_) is None}
        metas = [traced.get(id_) or await store.read_meta(id_, counts=not yes) for id_ in ids]
        if not yes:
            if not as_json:
                print_sessions(metas, short_ids([]))
            confirm(f"Delete {'this session' if len(ids) == 1 else f'these {len(ids)} sessions'} for ever?")
        deleted = []
        for id_ in ids:
            await states.remove_volumes(id_)
            if await store.delete_session(id_):
                deleted.append(id_)
        print_answer(as_json, {"deleted": deleted}, f"Deleted {', '.join(deleted)}.")


@command(app, "pause", panel=CHANGE, example="carrel sessions pause report")
async def pause(
    session: Id,
    timeout: Timeout = 60.0,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Save and close a durable session that another process has open."""
    async with open_store(base) as store:
        states = SessionStates(store)
        id_ = await store.resolve_id(session, traces=True)
        if await states.find(id_) is None:
            raise WrongUsage(f"the session {id_} is not durable: it was opened without a session_id or --session")
        was_open = await states.pause(id_, timeout or float("inf"))
        print_answer(
            as_json, {"session_id": id_, "was_open": was_open}, f"Paused {id_}." if was_open else f"{id_} was not open."
        )


@command(app, "prune", panel=CHANGE, example="carrel sessions prune --older-than 30d")
async def prune(
    older_than: OlderThan,
    labelled: Annotated[bool, typer.Option("--labelled", help="Delete sessions with labels too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete them. Default: only list them.")] = False,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Delete sessions that have not changed for a while.

    Without --yes it only lists them. Sessions with a label are kept, unless --labelled is given; durable sessions that
    a process has open, and sessions written by a newer carrel, are always kept."""
    age = parse_age(older_than)
    async with open_store(base) as store:
        # Counted before they are deleted.
        is_open = [id_ for id_, state in (await SessionStates(store).all()).items() if state.owner is not None]
        selected = await store.counted(await store.prune(age, keep_labelled=not labelled, keep=is_open))
        if yes:
            counted = {meta["id"]: meta for meta in selected}
            for meta in selected:
                try:
                    await SessionStates(store).remove_volumes(meta["id"])
                except (SessionBusy, SandboxUnavailable) as problem:
                    print(f"{meta['id']} is kept: {problem}", file=sys.stderr)
                    is_open.append(meta["id"])
            deleted = await store.prune(age, keep_labelled=not labelled, dry_run=False, keep=is_open)
            selected = [counted.get(meta["id"], meta) for meta in deleted]
        if as_json:
            print_json({"deleted": yes, "sessions": selected})
        elif not selected:
            print_text("No session is that old.")
        else:
            print_sessions(selected, short_ids([]))
            count = "1 session" if len(selected) == 1 else f"{len(selected):,} sessions"
            print_text(f"Deleted {count}." if yes else f"{count} would be deleted; --yes does it.")


command(app, "export", panel=COPY, example="carrel sessions export stars --output stars.html")(export_session)
command(app, "import", panel=COPY, example="carrel sessions import ~/.claude/projects")(import_sessions)


@command(app, "usage", panel=LOOK, example="carrel sessions usage stars")
async def usage(
    session: Id = "last",
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON: {"MODEL": {"input": 3, "output": 15}}, per million tokens.'),
    ] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Show the tokens used by each model.

    With --prices, also their cost. A fork counts only its own tokens."""
    table = read_json(prices) if prices is not None else None
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        try:
            spent = await store.usage(id_, table)
        except carrel.ConfigurationError as problem:
            raise WrongUsage(f"{prices}: {problem}") from None
        if as_json:
            print_json(spent.model_dump())
        else:
            print_usage(spent)


@command(app, "children", panel=LOOK, example="carrel sessions children stars")
async def children(session: Id = "last", base: Base = None, as_json: Json = False) -> None:
    """Show the sessions started or forked from a session."""
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        found = [await store.read_meta(meta["id"], counts=True) for meta in await store.children(id_)]
        if as_json:
            print_json(found)
        elif found:
            print_sessions(found, short_ids(meta["id"] for meta in await store.list_sessions()))
        else:
            print_text(f"{id_} has no children.")


@command(app, "tree", panel=LOOK, example="carrel sessions tree stars")
async def tree(session: Id = "last", base: Base = None, as_json: Json = False) -> None:
    """Show where a session was forked from, and its forks."""
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        metas = {meta["id"]: meta for meta in await store.counted(await store.list_sessions())}
        root, seen = id_, {id_}
        while (parent := metas[root].get("parent_session_id")) in metas and parent not in seen:
            root = parent
            seen.add(parent)
        family = family_tree(metas, root)
        if as_json:
            print_json([{"id": meta["id"], "depth": depth, "title": meta.get("title")} for depth, meta in family])
        else:
            print_tree(family, id_, short_ids(metas))


@command(app, "trace", panel=LOOK, example="carrel sessions trace work")
async def trace(
    session: Id = "last",
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Only the last N steps; 0 for all.")] = 0,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Show what a session did, with times.

    The steps are runs, calls of tools and workflows, commands, installs, checkpoints and verdicts."""
    async with open_store(base) as store:
        id_ = await _newest(store) if session == "last" else await store.resolve_id(session, traces=True)
        path = store.session_dir(id_)
        files = FileStore(path.parent)
        try:
            lines = [line async for line in TraceLog(files, f"{path.name}/trace.jsonl").read()]
        finally:
            await files.close()
        shown = lines[-limit:] if limit else lines
        if as_json:
            print_json(shown)
        elif not shown:
            print_text(f"{id_} has no trace: no code, tool or command was run in it.")
        else:
            print_trace(shown)


async def _newest(store: "carrel.SessionStore") -> str:
    """Return the id of the newest session, also of one without messages."""
    metas = [*await store.list_sessions(), *await store.traces()]
    if not metas:
        raise carrel.SessionNotFound("there are no sessions yet")
    return str(max(metas, key=lambda meta: meta["updated_at"])["id"])
