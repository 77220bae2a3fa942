"""The routes of the page. Each page has a permanent URL, and its data as JSON for `Accept: application/json`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from carrel.conversation.export.html_page import items_of, templates
from carrel.errors import ApprovalNotFound, CarrelError, ResultsRefused, SessionNotFound
from carrel.server.session_manager import SessionManager
from carrel.server.web.archive import MAX_COMPARED, Archive, Runs, SessionView, differing_entries
from carrel.server.web.comparison import Step, align_steps, compare_files, compare_tests, step_of
from carrel.server.web.login import COOKIE, Logins, Visitor, read_form, refuse_foreign
from carrel.tasks import attempts_of, compare, summary_of
from carrel.text import json_bytes, neutralize_control_chars, parse_time, readable_time, single_line
from carrel.wire.answers import ApprovalRecord, CheckpointRecord
from carrel.wire.requests import MESSAGE_ROLES, AnswerApproval, ForkSession

if TYPE_CHECKING:
    from jinja2 import Environment

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PACKAGE = "carrel.server.web"
_MAX_DIFF_LINES = 20_000
_MAX_TEXT = 20_000
"""Characters of one text on the page of a conversation."""
_MAX_DATA = 2_000_000
"""Characters of an image or document, as base64, on the page of a conversation."""


@dataclass(frozen=True)
class View:
    """What a page shows: a template with its variables, and the same data for programs."""

    template: str
    view: Mapping[str, Any]
    data: Any


Handler = Callable[[Request, Visitor], Awaitable[View | Response]]


class Pages:
    """The pages of some archives, by name. `manager` is the server whose sessions live."""

    def __init__(
        self,
        archives: Mapping[str, Archive],
        logins: Logins,
        *,
        host: str,
        runs: Runs | None = None,
        manager: SessionManager | None = None,
    ) -> None:
        self._archives = archives
        self._logins = logins
        self._host = host
        self._runs = runs
        self._manager = manager

    def routes(self) -> list[Route]:
        pages: dict[str, Handler] = {
            "/": self._sessions,
            "/s/{id}": self._conversation,
            "/s/{id}/tree": self._tree,
            "/s/{id}/trace": self._trace,
            "/s/{id}/files": self._files,
            "/s/{id}/verdicts": self._verdicts,
            "/s/{id}/rewind": self._confirm_rewind,
            "/s/{id}/export.html": self._export,
            "/s/{id}/numbers": self._numbers,
            "/compare": self._compare,
            "/tasks": self._all_runs,
            "/tasks/compare": self._compare_runs,
            "/tasks/{run}": self._run,
            "/waiting": self._waiting,
        }
        actions: dict[str, Handler] = {
            "/s/{id}/do/{action}": self._act,
            "/waiting/{approval}": self._answer_approval,
        }
        routes = [Route(path, partial(self._serve, handler), methods=["GET"]) for path, handler in pages.items()]
        routes += [Route(path, partial(self._serve, handler), methods=["POST"]) for path, handler in actions.items()]
        return [
            *routes,
            Route("/enter", self._enter, methods=["GET", "POST"]),
            Route("/leave", self._leave, methods=["POST"]),
            Route("/page.css", _style),
            Route("/page.js", _script),
        ]

    async def _serve(self, handler: Handler, request: Request) -> Response:
        if reason := refuse_foreign(request.headers, request.method, self._host):
            return _render(request, _problem(reason), Visitor(None), 403)
        visitor = await self._logins.visitor(request)
        if visitor is None:
            if request.method == "GET" and not _wants_json(request):
                wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(f"/enter?{urlencode({'next': wanted})}", 303, headers=_HEADERS)
            return _render(request, _problem("you are not logged in"), Visitor(None), 401)
        try:
            if request.method == "POST" and not visitor.may_act:
                raise HTTPException(403, "this page only shows; nothing can be changed with this login")
            found = await handler(request, visitor)
        except (SessionNotFound, ApprovalNotFound, ResultsRefused) as problem:
            return _render(request, _problem(str(problem)), visitor, 404)
        except HTTPException as problem:
            return _render(request, _problem(problem.detail), visitor, problem.status_code)
        except (CarrelError, OSError, ValueError) as problem:
            return _render(request, _problem(str(problem)), visitor, 409)
        return found if isinstance(found, Response) else _render(request, found, visitor)

    # --- logging in -------------------------------------------------------------------------------------------------

    async def _enter(self, request: Request) -> Response:
        if reason := refuse_foreign(request.headers, request.method, self._host):
            return _render(request, _problem(reason), Visitor(None), 403)
        # Only a path of this server: `//other.example` would be another one.
        wanted = request.query_params.get("next", "")
        wanted = wanted if wanted.startswith("/") and not wanted.startswith(("//", "/\\")) else "/"
        if request.method == "GET":
            return _render(request, View("enter", {"problem": "", "wanted": wanted}, {}), Visitor(None))
        try:
            address = request.client.host if request.client is not None else "unknown"
            cookie = await self._logins.enter((await read_form(request)).get("key", "").strip(), address)
        except HTTPException as problem:
            return _render(request, _problem(problem.detail), Visitor(None), problem.status_code)
        if cookie is None:
            again = {"problem": "This is not a valid key, or the link was used already.", "wanted": wanted}
            return _render(request, View("enter", again, {}), Visitor(None), 401)
        answer = RedirectResponse(wanted, 303, headers=_HEADERS)
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return answer

    async def _leave(self, request: Request) -> Response:
        if not refuse_foreign(request.headers, request.method, self._host):
            await self._logins.leave(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("/enter", 303, headers=_HEADERS)
        answer.delete_cookie(COOKIE)
        return answer

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _sessions(self, request: Request, visitor: Visitor) -> View:
        name = request.query_params.get("in", next(iter(self._archives)))
        if name not in self._archives:
            raise HTTPException(404, f"there are no sessions of {name!r} here")
        archive, words = self._archives[name], request.query_params.get("q", "").strip()
        number = _number(request, "page") or 1
        if visitor.session is not None:
            row = (await archive.session(visitor.user, visitor.session)).row
            rows, has_more = [row], False
        elif words:
            rows, has_more = await archive.search(visitor.user, words), False
        else:
            rows, has_more = await archive.sessions(visitor.user, number)
        waiting = sum(each.status == "pending" for each in await self._approvals(visitor))
        view = {"rows": rows, "words": words, "page": number, "has_more": has_more, "waiting": waiting, "name": name}
        return View("sessions", {**view, "names": list(self._archives)}, view)

    async def _find(self, request: Request, visitor: Visitor) -> tuple[Archive, SessionView]:
        return await self._find_named(request.path_params["id"], visitor)

    async def _find_named(self, session_id: str, visitor: Visitor) -> tuple[Archive, SessionView]:
        if visitor.session in (None, session_id):
            for archive in self._archives.values():
                try:
                    return archive, await archive.session(visitor.user, session_id)
                except SessionNotFound:
                    continue
        raise SessionNotFound(f"there is no session {session_id!r}")

    async def _conversation(self, request: Request, visitor: Visitor) -> View:
        archive, session = await self._find(request, visitor)
        at = _number(request, "at")
        window = await archive.window(session.id, at=at, before=_number(request, "before"))
        items = items_of([(seq, _shortened(entry)) for seq, entry in window.entries], session.meta)
        view = {"session": session, "tab": "conversation", "items": items, "window": window, "at": at}
        entries = [{"seq": seq, "entry": entry} for seq, entry in window.entries]
        return View("conversation", view, {"session": session, "last_seq": window.last_seq, "entries": entries})

    async def _tree(self, request: Request, visitor: Visitor) -> View:
        archive, session = await self._find(request, visitor)
        family = [] if visitor.session else await archive.family(visitor.user, session.id)
        rows = [{"depth": depth, "session": row} for depth, row in family]
        labels = await archive.conversations.labels(session.id) if session.meta.get("message_count") else []
        points: list[CheckpointRecord] = []
        if self._manager is not None and visitor.user is not None and session.state == "ready":
            points = await self._manager.checkpoints(visitor.user, session.id)
        data = {"session": session, "labels": labels, "checkpoints": points}
        return View("tree", {**data, "tab": "tree", "rows": rows}, {**data, "family": rows})

    async def _confirm_rewind(self, request: Request, visitor: Visitor) -> View:
        """What would be undone: the messages after a checkpoint, or the entries after one of them."""
        archive, session = await self._find(request, visitor)
        to = request.query_params.get("to", "")
        undone: list[Step] = []
        if visitor.user is not None:
            manager, user = self._acting(visitor)
            point = next((each for each in await manager.checkpoints(user, session.id) if each.id == to), None)
            if point is None:
                raise HTTPException(404, f"there is no checkpoint {single_line(to)[:100]!r}")
            data = await archive.conversations.load_session(session.id, repair=False)
            messages = data["messages"] if data is not None else []
            undone = [step_of(0, message) for message in messages[point.messages :]]
        else:
            after = _number(request, "to") or 0
            steps = [step_of(*each) async for each in archive.entries(session.id) if each[0] > after]
            undone = [step for step in steps if step.role in MESSAGE_ROLES]
        view = {"session": session, "tab": "rewind", "to": to, "undone": undone}
        return View("rewind", view, {"session": session, "to": to, "undone": undone})

    async def _trace(self, request: Request, visitor: Visitor) -> View:
        archive, session = await self._find(request, visitor)
        steps = [{"depth": depth, **line.model_dump()} for depth, line in await archive.trace(visitor.user, session.id)]
        view = {"session": session, "tab": "trace", "steps": steps, "bars": _bars(steps)}
        return View("trace", view, {"session": session, "steps": steps})

    async def _files(self, request: Request, visitor: Visitor) -> View:
        archive, session = await self._find(request, visitor)
        diff = await archive.diff(visitor.user, session)
        view = {"session": session, "tab": "files", "diff": diff, "lines": _diff_lines(diff.diff) if diff else []}
        return View("files", view, {"session": session, "diff": diff})

    async def _verdicts(self, request: Request, visitor: Visitor) -> View:
        _, session = await self._find(request, visitor)
        jobs = [job if visitor.sees_tests else job.without_tests() for job in session.jobs]
        return View("verdicts", {"session": session, "tab": "verdicts", "jobs": jobs}, {"verdicts": jobs})

    async def _export(self, request: Request, visitor: Visitor) -> Response:
        archive, session = await self._find(request, visitor)
        text = await archive.conversations.export(session.id, "html")
        headers = {**_HEADERS, "Content-Disposition": f'attachment; filename="{session.id}.html"'}
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), headers=headers)

    async def _numbers(self, request: Request, visitor: Visitor) -> Response:
        """How far a session is: pages that are open ask for it."""
        archive, session = await self._find(request, visitor)
        numbers = {"last_seq": await archive.last_seq(session.id), "state": session.state}
        return Response(json_bytes(numbers), headers=_HEADERS, media_type="application/json")

    async def _compare(self, request: Request, visitor: Visitor) -> View:
        found = []
        for name in ("a", "b"):
            session_id, _, until = request.query_params.get(name, "").partition("@")
            if until and not (until.isascii() and until.isdigit() and len(until) <= 15):
                raise HTTPException(422, f"{name}: write ID or ID@ENTRY, where ENTRY is the number of an entry")
            found.append((*await self._find_named(session_id, visitor), int(until) if until else None))
        (archive_a, a, until_a), (archive_b, b, until_b) = found
        common, only_a, only_b = await differing_entries(archive_a, a.id, until_a, archive_b, b.id, until_b)
        results = [next((job.result for job in reversed(each.jobs) if job.result), None) for each in (a, b)]
        data = {
            "common": common,
            "conversation": align_steps(only_a, only_b),
            "files": compare_files(await archive_a.diff(visitor.user, a), await archive_b.diff(visitor.user, b)),
            "tests": compare_tests(*results) if visitor.sees_tests else [],
            "is_complete": max(len(only_a), len(only_b)) < MAX_COMPARED,
        }
        return View("compare", {"a": a, "b": b, "results": results, **data}, {"a": a.row, "b": b.row, **data})

    # --- runs of tasks ----------------------------------------------------------------------------------------------

    def _shown_runs(self, visitor: Visitor) -> Runs:
        if self._runs is None or visitor.user is not None:
            raise HTTPException(404, "runs of tasks are shown by `carrel web` on the machine where they were made")
        return self._runs

    async def _all_runs(self, request: Request, visitor: Visitor) -> View:
        runs = [{"name": name, "info": info} for name, info in await self._shown_runs(visitor).all()]
        return View("runs", {"runs": runs}, {"runs": runs})

    async def _run(self, request: Request, visitor: Visitor) -> View:
        name = request.path_params["run"]
        info, results = await self._shown_runs(visitor).one(name)
        cells = {(result.sample_id, result.attempt): result for result in results}
        ends: dict[str, set[bool]] = {}
        for result in results:
            ends.setdefault(result.sample_id, set()).add(result.is_success)
        flaky = {sample for sample, found in ends.items() if len(found) > 1}
        summary = summary_of(results, info.attempts)
        view = {"name": name, "info": info, "cells": cells, "flaky": flaky, "summary": summary}
        return View("run", view, {"name": name, "run": info, "summary": summary, "results": results})

    async def _compare_runs(self, request: Request, visitor: Visitor) -> View:
        names = [request.query_params.get(name, "") for name in ("a", "b")]
        runs = self._shown_runs(visitor)
        results = [attempts_of((await runs.one(name))[1]) for name in names]
        found = compare(*results)
        return View("compare_runs", {"names": names, "found": found}, {"runs": names, "comparison": found})

    # --- approvals and actions --------------------------------------------------------------------------------------

    async def _approvals(self, visitor: Visitor) -> list[ApprovalRecord]:
        if self._manager is None or visitor.user is None:
            return []
        every = await self._manager.approvals.list(visitor.user, None)
        return [each for each in every if visitor.session in (None, each.session_id)]

    async def _waiting(self, request: Request, visitor: Visitor) -> View:
        approvals = await self._approvals(visitor)
        pending = [each for each in approvals if each.status == "pending"]
        answered = [each for each in reversed(approvals) if each.status != "pending"][:50]
        return View("waiting", {"pending": pending, "answered": answered}, {"approvals": approvals})

    async def _answer_approval(self, request: Request, visitor: Visitor) -> Response:
        manager, user = self._acting(visitor)
        form = await read_form(request)
        answer = AnswerApproval.model_validate({"decision": form.get("decision"), "reason": form.get("reason", "")})
        await manager.answer_approval(user, request.path_params["approval"], answer)
        return RedirectResponse("/waiting", 303, headers=_HEADERS)

    def _acting(self, visitor: Visitor) -> tuple[SessionManager, str]:
        if self._manager is None or visitor.user is None:
            raise HTTPException(409, "this needs a running server: log in to the page of `carrel serve`")
        return self._manager, visitor.user

    async def _act(self, request: Request, visitor: Visitor) -> Response:
        archive, session = await self._find(request, visitor)
        action, form, to = request.path_params["action"], await read_form(request), session.id
        at = int(form["at"]) if form.get("at") else None
        if action == "label":
            await archive.conversations.label(session.id, form.get("text", ""), at)
        elif action == "fork" and visitor.user is None:
            to = (await archive.conversations.fork_session(session.id, at, load=False))["session"]["id"]
        elif action == "fork":
            manager, user = self._acting(visitor)
            to = (await manager.fork(user, session.id, ForkSession())).session_id
        elif action == "checkpoint":
            manager, user = self._acting(visitor)
            await manager.checkpoint(user, session.id, form.get("text", ""))
        elif action == "rewind" and visitor.user is None:
            await archive.conversations.append_rewind(session.id, to_seq=int(form.get("to", "")))
        elif action == "rewind":
            manager, user = self._acting(visitor)
            # It makes the rewind itself something that can be undone.
            await manager.checkpoint(user, session.id, "before the rewind")
            await manager.rewind(user, session.id, form.get("to", ""))
        elif action == "interrupt":
            manager, user = self._acting(visitor)
            await (await manager.hosted(user, session.id)).executor().interrupt()
        elif action == "verify":
            manager, user = self._acting(visitor)
            await manager.start_verification(user, session.id, None)
            return RedirectResponse(f"/s/{to}/verdicts", 303, headers=_HEADERS)
        elif action == "close":
            manager, user = self._acting(visitor)
            await manager.close(user, session.id)
        else:
            raise HTTPException(404, f"there is no action {action!r}")
        return RedirectResponse(f"/s/{to}", 303, headers=_HEADERS)


def _problem(text: str) -> View:
    return View("problem", {"text": text}, {"detail": text})


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15 or int(text) < 1:
        raise HTTPException(422, f"{name}: {single_line(text)[:100]!r} is not a number from 1")
    return int(text)


def _wants_json(request: Request) -> bool:
    return request.headers.get("accept", "").startswith("application/json")


def _render(request: Request, answer: View, visitor: Visitor, status: int = 200) -> Response:
    if _wants_json(request):
        data = json_bytes(_plain(answer.data))
        return Response(data, status, headers=_HEADERS, media_type="application/json")
    html = _templates().get_template(f"{answer.template}.html.j2").render(visitor=visitor, **answer.view)
    return HTMLResponse(html.encode("utf-8", "backslashreplace"), status, headers=_HEADERS)


def _plain(thing: Any) -> Any:
    """Return data for JSON."""
    match thing:
        case BaseModel():
            return thing.model_dump(mode="json")
        case Mapping():
            return {str(name): _plain(part) for name, part in thing.items()}
        case str():
            return thing
        case Sequence():
            return [_plain(part) for part in thing]
        case _ if is_dataclass(thing) and not isinstance(thing, type):
            return _plain(asdict(thing))
        case _:
            return thing if isinstance(thing, bool | int | float | None) else str(thing)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = templates(_PACKAGE)
    environment.filters.update(line=single_line, text=neutralize_control_chars, when=readable_time)
    return environment


def _shortened(value: Any) -> Any:
    """Return an entry without the middle of very long texts and without large images, so that a page stays small."""
    match value:
        case str() if len(value) > _MAX_TEXT:
            half, left_out = _MAX_TEXT // 2, len(value) - _MAX_TEXT
            return f"{value[:half]}\n… {left_out:,} characters left out; the saved file has them …\n{value[-half:]}"
        case dict():
            return {name: _short_data(part) if name == "data" else _shortened(part) for name, part in value.items()}
        case list():
            return [_shortened(part) for part in value]
        case _:
            return value


def _short_data(data: Any) -> Any:
    """Return base64 data as it is, or nothing if it is too large."""
    if not isinstance(data, str):
        return _shortened(data)
    return data if len(data) <= _MAX_DATA else ""


def _diff_lines(diff: str) -> list[tuple[str, str]]:
    """Return the lines of a diff, each with its kind."""
    kinds = {"+": "added", "-": "removed", "@": "place"}
    heads = ("+++", "---", "diff ")
    return [
        ("head" if line.startswith(heads) else kinds.get(line[:1], "same"), line)
        for line in diff.splitlines()[:_MAX_DIFF_LINES]
    ]


def _bars(steps: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return where each step begins on the time axis and how long it is, in percent."""
    starts = [parse_time(step.get("started_at")) for step in steps]
    known = [start.timestamp() for start in starts if start is not None]
    if not known:
        return [(0.0, 0.0)] * len(steps)
    first = min(known)
    ends = [s.timestamp() + float(step.get("duration") or 0) for s, step in zip(starts, steps, strict=True) if s]
    whole = max(max(ends) - first, 0.001)
    return [
        (100 * (start.timestamp() - first) / whole, max(0.3, 100 * float(step.get("duration") or 0) / whole))
        if start is not None
        else (0.0, 0.0)
        for start, step in zip(starts, steps, strict=True)
    ]


@lru_cache(maxsize=2)
def _asset(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text("utf-8")


async def _style(request: Request) -> Response:
    text = _asset("carrel.conversation.export", "page.css") + _asset(_PACKAGE, "page.css")
    return Response(text, headers=_HEADERS, media_type="text/css")


async def _script(request: Request) -> Response:
    text = _asset(_PACKAGE, "page.js")
    return Response(text, headers=_HEADERS, media_type="text/javascript")
