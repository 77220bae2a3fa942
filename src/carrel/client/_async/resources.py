"""The calls for health, datasets, samples, verifications and approvals."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from carrel.client._async.transport import AsyncTransport
from carrel.client.transport import (
    HOLD,
    Progress,
    Request,
    RequestOptions,
    WaitOptions,
    check_names,
    make_request,
    parse_as,
    parse_json,
    session_path,
    url_part,
)
from carrel.errors import ServerFailed
from carrel.wire.answers import (
    ApprovalList,
    ApprovalRecord,
    DatasetInfo,
    Health,
    NodeInfo,
    NodeList,
    SampleInfo,
    SampleList,
)
from carrel.wire.verification import Job

PAGE = 100


class AsyncResource:
    """A group of calls."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def _json(self, request: Request) -> Any:
        answer = await self._transport.send(request)
        return parse_json(answer.content, request)


class AsyncHealth(AsyncResource):
    """`client.health`."""

    async def check(self, **options: Unpack[RequestOptions]) -> Health:
        """Return the state of the server; needs no key."""
        request = make_request(self.check, options, "GET", "/health", "check the health of the server")
        return parse_as(Health, await self._json(request), request)


class AsyncNodes(AsyncResource):
    """`client.nodes`."""

    async def list(self, **options: Unpack[RequestOptions]) -> list[NodeInfo]:
        """Return the nodes of the cluster; a server that is not part of one lists itself."""
        request = make_request(self.list, options, "GET", "/nodes", "list nodes")
        return parse_as(NodeList, await self._json(request), request).nodes


class AsyncDatasets(AsyncResource):
    """`client.datasets`."""

    async def list(self, **options: Unpack[RequestOptions]) -> list[DatasetInfo]:
        """Return all datasets of the server."""
        request = make_request(self.list, options, "GET", "/datasets", "list datasets")
        found = await self._json(request)
        if not isinstance(found, list):
            raise ServerFailed(f"{request.action}: the answer is not a list")
        return [parse_as(DatasetInfo, each, request) for each in found]


class AsyncSamples(AsyncResource):
    """`client.samples`."""

    async def list(
        self,
        *,
        dataset: str | None = None,
        page: int | None = None,
        page_size: int | None = None,
        search: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> SampleList:
        """Return a page of samples, or all of them without `page`."""
        query = {"dataset": dataset, "page": page, "page_size": page_size, "search": search}
        request = make_request(self.list, options, "GET", "/samples", "list samples", query=query)
        return parse_as(SampleList, await self._json(request), request)

    async def each(
        self, *, dataset: str | None = None, search: str | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[SampleInfo]:
        """Iterate over all samples, requesting page by page."""
        check_names(self.each, options)
        number, has_more = 1, True
        while has_more:
            page = await self.list(dataset=dataset, search=search, page=number, page_size=PAGE, **options)
            for sample in page.samples:
                yield sample
            number, has_more = number + 1, page.has_more and bool(page.samples)

    async def download(
        self, sample_id: str, *, dataset: str, version: int | None = None, **options: Unpack[RequestOptions]
    ) -> bytes:
        """Return a sample's files as a .tar.gz."""
        request = self._download(self.download, sample_id, dataset, version, options)
        return (await self._transport.send(request)).content

    async def download_to(
        self,
        to: str | Path,
        sample_id: str,
        *,
        dataset: str,
        version: int | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Path:
        """Download a sample's files into a .tar.gz here, which appears only when it is complete."""
        request = self._download(self.download_to, sample_id, dataset, version, options)
        return await self._transport.download(request, Path(to), on_progress)

    def _download(
        self, call: Callable[..., Any], sample_id: str, dataset: str, version: int | None, options: RequestOptions
    ) -> Request:
        path = f"/samples/{url_part('dataset', dataset)}/{url_part('sample_id', sample_id)}/download"
        query = {"version": version}
        return make_request(call, options, "GET", path, f"download {dataset}/{sample_id}", query=query)


class AsyncVerify(AsyncResource):
    """`client.sessions.verify`."""

    async def start(
        self,
        session_id: str,
        *,
        wait_for_completion: bool = True,
        on_progress: Callable[[Job], object] | None = None,
        **options: Unpack[WaitOptions],
    ) -> Job:
        """Verify the session's work so far, in a copy, and return the finished job.

        A job that failed has the status "error", and `error` says why."""
        hold = HOLD if wait_for_completion else 0.0
        path, action = f"{session_path(session_id)}/verify", f"verify session {session_id}"
        request = make_request(self.start, options, "POST", path, action, hold=hold)
        data = await self._json(request)
        job_id = data.get("job_id", "") if isinstance(data, dict) else ""

        async def look(hold: float, of: Request) -> Job:
            return await self._status(job_id, session_id, replace(of, hold=hold))

        complete = isinstance(data, dict) and "created_at" in data
        job = parse_as(Job, data, request) if complete else await look(hold, request)
        if not wait_for_completion:
            return job
        return await self._transport.wait(job, lambda job: job.is_finished, look, request, on_progress)

    async def status(self, job_id: str, *, session_id: str, **options: Unpack[RequestOptions]) -> Job:
        """Return a verification as it is now."""
        request = make_request(self.status, options, "GET", "", "", hold=0.0)
        return await self._status(job_id, session_id, request)

    async def _status(self, job_id: str, session_id: str, like: Request) -> Job:
        path = f"{session_path(session_id)}/verify/{url_part('job_id', job_id)}"
        action = f"get verification {job_id} of session {session_id}"
        request = like.following(path, action)
        return parse_as(Job, await self._json(request), request)

    async def cancel(self, job_id: str, *, session_id: str, **options: Unpack[RequestOptions]) -> Job:
        """Cancel a verification; the session stays as it is."""
        path = f"{session_path(session_id)}/verify/{url_part('job_id', job_id)}"
        action = f"cancel verification {job_id} of session {session_id}"
        request = make_request(self.cancel, options, "DELETE", path, action)
        return parse_as(Job, await self._json(request), request)


class AsyncApprovals(AsyncResource):
    """`client.approvals`: tool calls that wait for approval."""

    async def list(self, *, status: str | None = None, **options: Unpack[RequestOptions]) -> list[ApprovalRecord]:
        """Return the approvals, oldest first; `status` is pending, approved, refused or expired."""
        query = {"status": status}
        request = make_request(self.list, options, "GET", "/approvals", "list approvals", query=query)
        return parse_as(ApprovalList, await self._json(request), request).approvals

    async def answer(
        self,
        approval_id: str,
        decision: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        reason: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> ApprovalRecord:
        """Answer with "approve" (with other `arguments`, if given) or "refuse"; `NotNow` if it was answered before."""
        path, action = f"/approvals/{url_part('approval_id', approval_id)}", f"answer approval {approval_id}"
        body = {"decision": decision, "arguments": arguments, "reason": reason}
        request = make_request(self.answer, options, "POST", path, action, body=body)
        return parse_as(ApprovalRecord, await self._json(request), request)
