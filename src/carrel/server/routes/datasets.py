"""Routes without a session: health, metrics, datasets, samples and approvals."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import FileResponse

from carrel.server.dependencies import PROBLEMS, JsonRoute, KeyDep, ManagerDep, MetricsDep, UserDep, bearer, problem
from carrel.server.records import now
from carrel.tasks.dataset import Datasets
from carrel.tasks.file_cache import archive_of
from carrel.tasks.sample import WIRE_FIELDS, Sample
from carrel.version import __version__
from carrel.wire.answers import (
    ApprovalList,
    ApprovalRecord,
    ApprovalStatus,
    DatasetInfo,
    Health,
    NodeList,
    SampleInfo,
    SampleList,
)
from carrel.wire.requests import AnswerApproval

open_routes = APIRouter()
router = APIRouter(dependencies=[Depends(bearer)], responses=PROBLEMS, route_class=JsonRoute)
_GZIP = {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}


@open_routes.get("/health", tags=["server"])
async def get_health(manager: ManagerDep) -> Health:
    """The state of the server; the only route that needs no key."""
    status = "healthy" if manager.node is None or manager.node.state == "ready" else manager.node.state
    return Health(service="carrel", status=status, timestamp=now().isoformat(), version=__version__)


@router.get("/metrics", tags=["server"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(metrics: MetricsDep) -> Response:
    """Numbers about the server in the format of Prometheus."""
    return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/nodes", tags=["server"])
async def get_nodes(manager: ManagerDep) -> NodeList:
    """The nodes of the cluster; a server that is not part of one lists itself."""
    if manager.node is None:
        return NodeList(nodes=[manager.info("")])
    return NodeList(nodes=manager.node.nodes())


@router.get("/datasets", tags=["datasets"])
async def get_datasets(manager: ManagerDep) -> list[DatasetInfo]:
    """All datasets that can be read."""
    return await asyncio.to_thread(manager.datasets.list)


@router.get("/samples", tags=["datasets"])
async def get_samples(
    manager: ManagerDep,
    key: KeyDep,
    dataset: Annotated[str | None, Query(max_length=200)] = None,
    page: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    page_size: Annotated[int | None, Query(ge=1, le=100)] = None,
    search: Annotated[str | None, Query(max_length=200, description="A part of the instance's id")] = None,
) -> SampleList:
    """All samples, or a page of them."""
    found = await asyncio.to_thread(_read_samples, manager.datasets, dataset)
    if search:
        found = [sample for sample in found if search.lower() in sample.instance_id.lower()]
    size = page_size or (100 if page is not None else max(len(found), 1))
    first = ((page or 1) - 1) * size
    shown = [
        SampleInfo.model_validate(sample.model_dump(include=set(WIRE_FIELDS))) for sample in found[first : first + size]
    ]
    return SampleList(
        samples=[sample.without_solution() for sample in shown] if key.scope == "agent" else shown,
        total_count=len(found),
        page=page or 1,
        page_size=size,
        has_more=first + len(shown) < len(found),
    )


def _read_samples(datasets: Datasets, name: str | None) -> list[Sample]:
    if name:
        return datasets.get(name).samples
    return [sample for dataset in datasets.list() for sample in datasets.get(dataset.name).samples]


@router.get(
    "/samples/{dataset}/{sample_id}/download",
    tags=["datasets"],
    response_class=FileResponse,
    responses={200: _GZIP, 404: problem("`DatasetNotFound`, `SampleNotFound`: there is no such sample.")},
)
async def download_sample(
    manager: ManagerDep, dataset: str, sample_id: str, version: Annotated[int | None, Query(ge=1)] = None
) -> FileResponse:
    """The files of a sample, as its sessions start with them."""
    sample = (await asyncio.to_thread(manager.datasets.get, dataset)).sample(sample_id, version)
    archive = await archive_of(sample, manager.settings.cache_dir)
    return FileResponse(archive, media_type="application/gzip", filename=f"{sample.sample_id}.tar.gz")


@router.get("/approvals", tags=["approvals"])
async def get_approvals(manager: ManagerDep, user: UserDep, status: ApprovalStatus | None = None) -> ApprovalList:
    """The tool calls of the user's sessions that wait for approval, or were answered; oldest first."""
    return ApprovalList(approvals=await manager.approvals.list(user, status))


@router.post(
    "/approvals/{approval_id}",
    tags=["approvals"],
    responses={
        404: problem("`ApprovalNotFound`: there is no such approval."),
        409: problem("`ApprovalAnswered`: it is answered or expired already."),
    },
)
async def answer_approval(
    manager: ManagerDep, user: UserDep, approval_id: str, answer: AnswerApproval
) -> ApprovalRecord:
    """Approve or refuse a tool call; of two answers the first counts, and the other is a 409."""
    return await manager.answer_approval(user, approval_id, answer)
