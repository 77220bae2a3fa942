"""`carrel sessions export` and `import`: conversations to files, and from the files of other agents."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer

import carrel
from carrel.cli.conversation_view import print_imports, short_ids
from carrel.cli.exit_codes import TaskFailed, WrongUsage
from carrel.cli.options import Base, Id, Json, open_store
from carrel.cli.output import is_terminal, plain_data, print_answer, print_json, write_file, write_raw
from carrel.conversation.export import Format
from carrel.text import escape_control_chars_in_json, readable_size


async def export_session(
    session: Id,
    format_: Annotated[
        Format | None,
        typer.Option("--format", "-f", help="Default: by the suffix of the output file, else jsonl."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    redact: Annotated[bool, typer.Option("--redact", help="Replace keys, tokens and passwords.")] = False,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Export a session as JSON lines, Markdown or an HTML page."""
    suffixes: dict[str, Format] = {".html": "html", ".htm": "html", ".md": "markdown"}
    chosen = format_ or suffixes.get(output.suffix if output else "", "jsonl")
    if output is not None and output.exists() and not force:
        raise WrongUsage(f"{output} exists; --force overwrites it")
    if output is None and as_json:
        raise WrongUsage("--json describes the written file, so it needs --output")
    async with open_store(base) as store:
        id_ = await store.resolve_id(session)
        options: dict[str, Any] = {"redact": carrel.redact_secrets} if redact else {}
        if chosen == "jsonl":
            pieces = store.export_lines(id_, **options)
        else:
            pieces = _one_piece(await store.export(id_, chosen, **options))
        if output is None:
            escape = escape_control_chars_in_json if chosen == "jsonl" and is_terminal() else str
            async for piece in pieces:
                write_raw(escape(piece))
            return
        size = await write_file(output, pieces)
    print_answer(
        as_json,
        {"session_id": id_, "format": chosen, "path": str(output.absolute()), "bytes": size},
        f"Wrote {output} ({readable_size(size)}).",
    )


async def _one_piece(text: str) -> AsyncIterator[str]:
    yield text


async def import_sessions(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Session files, or folders of them.")],
    all_branches: Annotated[
        bool, typer.Option("--all-branches", help="Import abandoned branches too, as sessions of their own.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Import files again that were imported before.")] = False,
    redact: Annotated[bool, typer.Option("--redact", help="Replace keys, tokens and passwords in messages.")] = False,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Import sessions of other agents.

    Claude Code, Codex, pi, Mistral Vibe (and other OpenAI chat messages), and folders of carrel's format. Unknown lines
    are counted and reported. If a file was imported before, only its new lines are added."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise WrongUsage(f"there is no file {missing[0]}")
    reports, refused = [], []
    async with open_store(base, must_exist=False, redact=redact) as store:
        for path in paths:
            try:
                reports += await store.import_file(path, all_branches=all_branches, again=again)
            except carrel.ImportRefused as problem:
                refused.append(f"{path}: {problem}" if str(path) not in str(problem) else str(problem))
        every = [meta["id"] for meta in await store.list_sessions()]
    if as_json:
        print_json({"imports": [plain_data(report) for report in reports], "refused": refused})
    else:
        print_imports(reports, short_ids(every), redacted=redact)
    stored = [report for report in reports if report.session_id or (report.already_here and not report.problems)]
    refused += [f"{report.path}: {report.refused}" for report in reports if report.refused]
    if refused:
        raise TaskFailed("; ".join(refused))
    if not stored:
        raise TaskFailed("nothing was imported")
