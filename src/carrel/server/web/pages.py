"""The routes of the page. Each page has a permanent URL, and its data as JSON for `Accept: application/json`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from carrel.conversation.export.html_page import items_of
from carrel.conversation.redaction import redact_secrets
from carrel.errors import ApprovalNotFound, CarrelError, PointNotFound, ResultsRefused, SessionNotFound
from carrel.server.routes.datasets import get_nodes
from carrel.server.session_manager import SessionManager
from carrel.server.web.archive import (
    FILTERED_WINDOW,
    OUTLINED,
    WINDOW,
    Archive,
    Runs,
    SessionView,
    Window,
)
from carrel.server.web.comparison import (
    ComparedStep,
    Side,
    compare_sides,
    step_of,
    test_outcomes,
)
from carrel.server.web.login import COOKIE, SHARE_DAYS, Logins, Visitor, read_form, refuse_foreign
from carrel.server.web.outline import KINDS, OutlineLine, only_kinds, outline_of
from carrel.server.web.tree import SHOWN, lanes_of
from carrel.server.web.views import (
    HEADERS,
    View,
    bars,
    diff_lines,
    download,
    number_of,
    problem_view,
    render,
    script,
    shortened,
    style,
    wants_json,
)
from carrel.session import Point, RecordedState, compare_variables
from carrel.tasks import attempts_of, compare, summary_of
from carrel.text import json_bytes, single_line
from carrel.wire.answers import ApprovalRecord
from carrel.wire.requests import MESSAGE_ROLES, AnswerApproval, ForkSession

FILTERS = ("state", "model", "tag", "kind")
"""Names of query parameters that filter the list."""

Handler = Callable[[Request, Visitor], Awaitable[View | Response]]


@dataclass(frozen=True)
class Between:
    """Two points of a session, with what was recorded there."""

    archive: Archive
    session: SessionView
    first: Point
    before: RecordedState
    last: Point
    after: RecordedState
    names: list[str]
    """Points that can be chosen."""

    @property
    def view(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("session", "first", "before", "last", "after", "names")}

    @property
    def data(self) -> dict[str, Any]:
        return {"session": self.session, "from": self.first.name, "at": self.last.name, "recorded_at": self.after.at}


def _query(name: str, only: Mapping[str, str]) -> Callable[..., str]:
    """Return a function for links of the list: the address with some parameters changed; None removes one."""

    def address(**changes: str | int | None) -> str:
        kept = {"in": name, **only, **changes}
        return "/?" + urlencode({key: value for key, value in kept.items() if value is not None})

    return address


def _shown_to(visitor: Visitor, window: Window) -> Window:
    """Return entries without secrets for guests."""
    if not visitor.is_guest:
        return window
    return replace(window, entries=[(seq, redact_secrets(entry)) for seq, entry in window.entries])


def _outline(session: SessionView, window: Window) -> list[OutlineLine]:
    return outline_of(window.entries, session.jobs, is_end=window.last == window.last_seq)


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
            "/s/{id}/outline": self._whole_outline,
            "/s/{id}/tree": self._tree,
            "/s/{id}/trace": self._trace,
            "/s/{id}/variables": self._variables,
            "/s/{id}/files": self._files,
            "/s/{id}/files/{path:path}": self._file,
            "/s/{id}/share": self._shares,
            "/s/{id}/verdicts": self._verdicts,
            "/s/{id}/rewind": self._confirm_rewind,
            "/s/{id}/export.html": self._export,
            "/s/{id}/numbers": self._numbers,
            "/compare": self._compare,
            "/tasks": self._all_runs,
            "/tasks/compare": self._compare_runs,
            "/tasks/{run}": self._run,
            "/tasks/{run}/{sample:path}": self._sample,
            "/waiting": self._waiting,
            "/nodes": self._nodes,
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
            Route("/page.css", style),
            Route("/page.js", script),
        ]

    async def _serve(self, handler: Handler, request: Request) -> Response:
        if reason := refuse_foreign(request.headers, request.method, self._host):
            return render(request, problem_view(reason), Visitor(None), 403)
        visitor = await self._logins.visitor(request)
        if visitor is None:
            if request.method == "GET" and not wants_json(request):
                wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(f"/enter?{urlencode({'next': wanted})}", 303, headers=HEADERS)
            return render(request, problem_view("you are not logged in"), Visitor(None), 401)
        try:
            if request.method == "POST" and not visitor.may_act:
                raise HTTPException(403, "this page only shows; nothing can be changed with this login")
            found = await handler(request, visitor)
        except (SessionNotFound, PointNotFound, ApprovalNotFound, ResultsRefused) as problem:
            return render(request, problem_view(str(problem)), visitor, 404)
        except HTTPException as problem:
            return render(request, problem_view(problem.detail), visitor, problem.status_code)
        except (CarrelError, OSError, ValueError) as problem:
            return render(request, problem_view(str(problem)), visitor, 409)
        finally:
            if request.method == "POST":
                for archive in self._archives.values():
                    archive.changed()
        return found if isinstance(found, Response) else render(request, found, visitor)

    # --- logging in -------------------------------------------------------------------------------------------------

    async def _enter(self, request: Request) -> Response:
        if reason := refuse_foreign(request.headers, request.method, self._host):
            return render(request, problem_view(reason), Visitor(None), 403)
        # Only a path of this server: `//other.example` would be another one.
        wanted = request.query_params.get("next", "")
        wanted = wanted if wanted.startswith("/") and not wanted.startswith(("//", "/\\")) else "/"
        if request.method == "GET":
            return render(request, View("enter", {"problem": "", "wanted": wanted}, {}), Visitor(None))
        try:
            address = request.client.host if request.client is not None else "unknown"
            cookie = await self._logins.enter((await read_form(request)).get("key", "").strip(), address)
        except HTTPException as problem:
            return render(request, problem_view(problem.detail), Visitor(None), problem.status_code)
        if cookie is None:
            again = {"problem": "This is not a valid key, or the link was used already.", "wanted": wanted}
            return render(request, View("enter", again, {}), Visitor(None), 401)
        answer = RedirectResponse(wanted, 303, headers=HEADERS)
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return answer

    async def _leave(self, request: Request) -> Response:
        if not refuse_foreign(request.headers, request.method, self._host):
            await self._logins.leave(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("/enter", 303, headers=HEADERS)
        answer.delete_cookie(COOKIE)
        return answer

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _sessions(self, request: Request, visitor: Visitor) -> View:
        name = request.query_params.get("in", next(iter(self._archives)))
        if name not in self._archives:
            raise HTTPException(404, f"there are no sessions of {name!r} here")
        archive, words = self._archives[name], request.query_params.get("q", "").strip()
        number = number_of(request, "page") or 1
        only = {key: value for key in FILTERS if (value := request.query_params.get(key))}
        counts: Mapping[str, Mapping[str, int]] = {}
        if visitor.session is not None:
            rows, has_more = [(await archive.session(visitor.user, visitor.session)).row], False
        elif words:
            rows, has_more = await archive.search(visitor.user, words), False
        else:
            found = await archive.sessions(visitor.user, number, only)
            rows, has_more, counts = found.rows, found.has_more, found.counts
        waiting = sum(each.status == "pending" for each in await self._approvals(visitor))
        view = {"rows": rows, "words": words, "page": number, "has_more": has_more, "waiting": waiting, "name": name}
        view |= {"only": only, "counts": counts}
        return View("sessions", {**view, "names": list(self._archives), "query": _query(name, only)}, view)

    async def _find(self, request: Request, visitor: Visitor) -> tuple[Archive, SessionView]:
        return await self._find_named(request.path_params["id"], visitor)

    async def _find_named(self, session_id: str, visitor: Visitor) -> tuple[Archive, SessionView]:
        if visitor.session in (None, session_id):
            for archive in self._archives.values():
                try:
                    found = await archive.session(visitor.user, session_id)
                except SessionNotFound:
                    continue
                jobs = [job if visitor.sees_tests else job.without_tests() for job in found.jobs]
                return archive, replace(found, jobs=jobs)
        raise SessionNotFound(f"there is no session {session_id!r}")

    async def _conversation(self, request: Request, visitor: Visitor) -> View:
        archive, session = await self._find(request, visitor)
        kinds = [kind for kind in request.query_params.get("show", "").split(",") if kind]
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise HTTPException(422, f"show: {single_line(unknown[0])[:100]!r} is none of {', '.join(KINDS)}")
        at, before, after = number_of(request, "at"), number_of(request, "before"), number_of(request, "after", 0)
        # Of single kinds there is less to show, so more entries are looked at.
        size = FILTERED_WINDOW if kinds else WINDOW
        window = await archive.window(session.id, at=at, before=before, after=after, size=size)
        window = _shown_to(visitor, window)
        items = items_of([(seq, shortened(entry)) for seq, entry in window.entries], session.meta)
        view = {"session": session, "tab": "conversation", "window": window, "kinds": kinds, "all_kinds": KINDS}
        view["items"] = only_kinds(items, kinds) if kinds else items
        view["lines"] = _outline(session, window)
        entries = [{"seq": seq, "entry": entry} for seq, entry in window.entries]
        return View("conversation", view, {"session": session, "last_seq": window.last_seq, "entries": entries})

    async def _whole_outline(self, request: Request, visitor: Visitor) -> View:
        """The turns of a conversation with their calls, events and verdicts."""
        archive, session = await self._find(request, visitor)
        start = number_of(request, "from") or 1
        window = _shown_to(visitor, await archive.window(session.id, after=start - 1, size=OUTLINED))
        lines = _outline(session, window)
        data = {"session": session, "from": start, "last_seq": window.last_seq, "outline": lines}
        view = {"session": session, "tab": "outline", "window": window, "lines": lines, "size": OUTLINED}
        return View("outline", view, data)

    async def _tree(self, request: Request, visitor: Visitor) -> View:
        archive, session = await self._find(request, visitor)
        first = number_of(request, "first")
        nodes, first, total = await archive.tree(visitor.user, session.id, first, is_alone=visitor.session is not None)
        rows = list(zip(nodes, lanes_of([node.depth for node in nodes]), strict=True))
        data = {"session": session, "first": first, "sessions": total}
        view = {**data, "tab": "tree", "rows": rows, "last": first + SHOWN - 1, "shown": SHOWN}
        return View("tree", view, {**data, "family": nodes})

    async def _confirm_rewind(self, request: Request, visitor: Visitor) -> View:
        """What would be undone: the messages after a checkpoint, or the entries after one of them."""
        archive, session = await self._find(request, visitor)
        to = request.query_params.get("to", "")
        undone: list[ComparedStep] = []
        if visitor.user is not None:
            manager, user = self._acting(visitor)
            point = next((each for each in await manager.checkpoints(user, session.id) if each.id == to), None)
            if point is None:
                raise HTTPException(404, f"there is no checkpoint {single_line(to)[:100]!r}")
            data = await archive.conversations.load_session(session.id, repair=False)
            messages = data["messages"] if data is not None else []
            undone = [step_of(0, message) for message in messages[point.messages :]]
        else:
            after = number_of(request, "to") or 0
            steps = [step_of(*each) async for each in archive.entries(session.id) if each[0] > after]
            undone = [step for step in steps if step.role in (*MESSAGE_ROLES, "result")]
        _, then = await archive.state(visitor.user, session.id, to)
        _, now = await archive.state(visitor.user, session.id, "now")
        changed = [each for each in compare_variables(then, now) if each.kind not in ("same", "perhaps")]
        diff = await archive.differing_files(then, now)
        shown = {"session": session, "to": to, "undone": undone, "variables": changed, "files": diff}
        shown["name"] = f"entry {to}" if visitor.user is None else to
        return View("rewind", {**shown, "tab": "rewind", "lines": diff_lines(diff.diff)}, shown)

    async def _trace(self, request: Request, visitor: Visitor) -> View:
        archive, session = await self._find(request, visitor)
        steps = [{"depth": depth, **line.model_dump()} for depth, line in await archive.trace(visitor.user, session.id)]
        view = {"session": session, "tab": "trace", "steps": steps, "bars": bars(steps)}
        return View("trace", view, {"session": session, "steps": steps})

    async def _between(self, request: Request, visitor: Visitor) -> Between:
        """The two points of `from` and `at`, with what was recorded there."""
        archive, session = await self._find(request, visitor)
        names = [
            request.query_params.get(name, "").strip() or usual for name, usual in (("from", "start"), ("at", "now"))
        ]
        (first, before), (last, after) = [await archive.state(visitor.user, session.id, name) for name in names]
        labels = [label["text"] for label in session.meta.get("labels", ())]
        points = [point.label or point.id for point in await archive.points(session.id)]
        return Between(archive, session, first, before, last, after, ["start", *points, *labels, "now"])

    async def _variables(self, request: Request, visitor: Visitor) -> View:
        """The variables at a point, and how they differ from an earlier one."""
        found = await self._between(request, visitor)
        rows = compare_variables(found.before, found.after)
        is_compared = "from" in request.query_params
        if not is_compared:
            rows = sorted((row for row in rows if row.b is not None), key=lambda row: row.name)
        view = {**found.view, "tab": "variables", "rows": rows, "is_compared": is_compared}
        return View("variables", view, {**found.data, "variables": rows})

    async def _files(self, request: Request, visitor: Visitor) -> View:
        """The changed files at a point, and how they differ from an earlier one."""
        found = await self._between(request, visitor)
        is_whole = not {"at", "from"} & request.query_params.keys()
        diff: Any = await found.archive.diff(visitor.user, found.session) if is_whole else None
        if diff is None and (found.after.at is not None or not is_whole):
            diff = await found.archive.differing_files(found.before, found.after)
        view = {**found.view, "tab": "files", "diff": diff, "lines": diff_lines(diff.diff) if diff else []}
        return View("files", view, {**found.data, "diff": diff})

    async def _file(self, request: Request, visitor: Visitor) -> View | Response:
        """A changed file at a point, as text or as a download."""
        found, path = await self._between(request, visitor), request.path_params["path"]
        data = await found.archive.text(found.after, path)
        if data is None:
            raise HTTPException(404, f"the text of {single_line(path)[:200]!r} was not recorded there")
        text = data.decode("utf-8", "replace")
        if "download" in request.query_params:
            return download(redact_secrets.text(text).encode() if visitor.is_guest else data, path.rpartition("/")[2])
        view = {**found.view, "tab": "files", "path": path, "text": text}
        return View("file", view, {**found.data, "path": path, "text": text})

    async def _verdicts(self, request: Request, visitor: Visitor) -> View:
        _, session = await self._find(request, visitor)
        view = {"session": session, "tab": "verdicts", "jobs": session.jobs}
        return View("verdicts", view, {"verdicts": session.jobs})

    async def _export(self, request: Request, visitor: Visitor) -> Response:
        archive, session = await self._find(request, visitor)
        if visitor.is_guest:
            raise HTTPException(403, "with a share link, the conversation is only shown")
        text = await archive.conversations.export(session.id, "html")
        headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{session.id}.html"'}
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), headers=headers)

    async def _numbers(self, request: Request, visitor: Visitor) -> Response:
        """How far a session is: pages that are open ask for it."""
        archive, session = await self._find(request, visitor)
        numbers = {"last_seq": await archive.last_seq(session.id), "state": session.state}
        return Response(json_bytes(numbers), headers=HEADERS, media_type="application/json")

    async def _compare(self, request: Request, visitor: Visitor) -> View:
        """Two points, of one session or of two, in conversation, variables, files and tests."""
        sides = []
        for name in ("a", "b"):
            session_id, _, at = request.query_params.get(name, "").partition("@")
            archive, session = await self._find_named(session_id, visitor)
            point, state = await archive.state(visitor.user, session.id, at or "now")
            sides.append(Side(archive, session, point, state))
        a, b = sides
        data, diff = await compare_sides(a, b, visitor)
        results = [side.result for side in sides]
        view = {"a": a, "b": b, "results": results, **data, "lines": diff_lines(diff)}
        rows = [{**vars(side.session.row), "point": side.point.name} for side in sides]
        return View("compare", view, {"a": rows[0], "b": rows[1], **data, "diff": diff})

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

    async def _sample(self, request: Request, visitor: Visitor) -> View:
        """The attempts at a sample: which test passed in which."""
        name, sample = request.path_params["run"], request.path_params["sample"]
        _, results = await self._shown_runs(visitor).one(name)
        attempts = sorted((each for each in results if each.sample_id == sample), key=lambda each: each.attempt)
        if not attempts:
            raise HTTPException(404, f"run {name!r} has no attempt at {single_line(sample)[:100]!r}")
        outcomes = [test_outcomes(each.verdict) for each in attempts]
        rows = [(test, [of.get(test, "") for of in outcomes]) for test in sorted({*chain(*outcomes)})]
        rows.sort(key=lambda row: len(set(row[1])) == 1)
        data = {"run": name, "sample": sample, "attempts": attempts, "tests": rows}
        return View("sample", data, data)

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

    async def _nodes(self, request: Request, visitor: Visitor) -> View:
        if self._manager is None:
            raise HTTPException(404, "nodes are shown by the page of `carrel serve` or `carrel gateway`")
        if visitor.is_guest:
            raise HTTPException(403, "with a share link, only its session is shown")
        found = await get_nodes(self._manager)
        return View("nodes", {"nodes": found.nodes}, found)

    async def _answer_approval(self, request: Request, visitor: Visitor) -> Response:
        manager, user = self._acting(visitor)
        form = await read_form(request)
        given: dict[str, Any] = {"decision": form.get("decision"), "reason": form.get("reason", "")}
        if form.get("decision") == "approve" and (text := form.get("arguments", "").strip()):
            try:
                given["arguments"] = json.loads(text)
            except ValueError as problem:
                raise HTTPException(422, f"the arguments are not JSON: {problem}") from None
        answer = AnswerApproval.model_validate(given)
        await manager.answer_approval(user, request.path_params["approval"], answer)
        return RedirectResponse("/waiting", 303, headers=HEADERS)

    async def _share_view(self, session: SessionView, visitor: Visitor) -> dict[str, Any]:
        until = [
            datetime.fromtimestamp(moment, UTC).isoformat()
            for moment in await self._logins.shares(visitor.user, session.id)
        ]
        return {"session": session, "tab": "share", "until": until, "days": SHARE_DAYS, "link": ""}

    async def _shares(self, request: Request, visitor: Visitor) -> View:
        """The links by which others can read this session."""
        if not visitor.may_act:
            raise HTTPException(403, "only a login that may change sessions can share them")
        _, session = await self._find(request, visitor)
        view = await self._share_view(session, visitor)
        return View("share", view, {"session": session, "until": view["until"]})

    def _acting(self, visitor: Visitor) -> tuple[SessionManager, str]:
        if self._manager is None or visitor.user is None:
            raise HTTPException(409, "this needs a running server: log in to the page of `carrel serve`")
        return self._manager, visitor.user

    async def _act(self, request: Request, visitor: Visitor) -> Response:
        archive, session = await self._find(request, visitor)
        action, form, to = request.path_params["action"], await read_form(request), session.id
        at = int(form["at"]) if form.get("at") else None
        if action == "share":
            days = int(form.get("days", "0"))
            if days not in SHARE_DAYS:
                raise HTTPException(422, f"days: choose one of {', '.join(map(str, SHARE_DAYS))}")
            token = await self._logins.share(visitor.user, session.id, days)
            view = await self._share_view(session, visitor)
            origin = f"{request.url.scheme}://{request.headers['host']}"
            link = f"{origin}/enter?{urlencode({'next': f'/s/{session.id}'})}#{token}"
            return render(request, View("share", {**view, "link": link}, {"link": link, "days": days}), visitor)
        if action == "unshare":
            await self._logins.end_shares(visitor.user, session.id)
            return RedirectResponse(f"/s/{to}/share", 303, headers=HEADERS)
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
            return RedirectResponse(f"/s/{to}/verdicts", 303, headers=HEADERS)
        elif action == "close":
            manager, user = self._acting(visitor)
            await manager.close(user, session.id)
        else:
            raise HTTPException(404, f"there is no action {action!r}")
        return RedirectResponse(f"/s/{to}", 303, headers=HEADERS)
