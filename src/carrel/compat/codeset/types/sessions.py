"""The models of `client.sessions.verify`."""

from datetime import datetime
from typing import Literal

from carrel.compat.codeset.types import BaseModel, ContainerInfo, ErrorInfo
from carrel.compat.codeset.types import VerificationResult as Result

__all__ = ["JobStatus", "Result", "VerifyStartResponse", "VerifyStatusResponse"]

JobStatus = Literal["pending", "starting", "running", "completed", "error", "cancelled"]


class VerifyStartResponse(BaseModel):
    job_id: str | None = None
    status: str | None = None
    started_at: datetime | None = None


class VerifyStatusResponse(BaseModel):
    job_id: str | None = None
    session_id: str | None = None
    sample_id: str | None = None
    status: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    error: ErrorInfo | None = None
    result: Result | None = None
    container_info: ContainerInfo | None = None
