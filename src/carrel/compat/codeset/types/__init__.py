"""The models of codeset: those of carrel's wire under other names."""

from datetime import datetime
from typing import Any, Literal, Required, TypedDict

import pydantic

SessionStatus = Literal["creating", "ready", "error", "closed", "terminated"]


class BaseModel(pydantic.BaseModel):
    """An answer of the server: a field that it lacks is None, and one that this model does not know is kept."""

    model_config = pydantic.ConfigDict(extra="allow")

    def to_dict(
        self,
        *,
        mode: Literal["json", "python"] = "python",
        use_api_names: bool = True,
        exclude_unset: bool = True,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        warnings: bool = True,
    ) -> dict[str, object]:
        """Return the fields that the server sent."""
        return self.model_dump(
            mode=mode,
            by_alias=use_api_names,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
            warnings=warnings,
        )

    def to_json(self, *, indent: int | None = 2, **options: Any) -> str:
        """Return the same as text; the options are those of `to_dict`, without `mode`."""
        by_alias, unset = options.pop("use_api_names", True), options.pop("exclude_unset", True)
        return self.model_dump_json(indent=indent, by_alias=by_alias, exclude_unset=unset, **options)


class HealthCheckResponse(BaseModel):
    service: str | None = None
    status: str | None = None
    timestamp: str | None = None
    version: str | None = None


class DatasetListResponseItem(BaseModel):
    name: str | None = None
    sample_count: int | None = None
    created_at: datetime | None = None
    description: str | None = None


DatasetListResponse = list[DatasetListResponseItem]


class Sample(BaseModel):
    sample_id: str | None = None
    instance_id: str | None = None
    dataset: str | None = None
    repo: str | None = None
    language: str | None = None
    base_commit: str | None = None
    environment_setup_commit: str | None = None
    problem_statement: str | None = None
    hints_text: str | None = None
    patch: str | None = None
    test_patch: str | None = None
    non_code_patch: str | None = None
    fail_to_pass: list[str] | None = None
    pass_to_pass: list[str] | None = None
    fail_to_fail: list[str] | None = None
    verifier: str | None = None
    version: int | None = None
    latest: bool | None = None
    version_description: str | None = None
    description: str | None = None
    created_at: datetime | None = None


class SampleListResponse(BaseModel):
    samples: list[Sample] | None = None
    total_count: int | None = None
    page: int | None = None
    page_size: int | None = None
    has_more: bool | None = None


class ErrorInfo(BaseModel):
    code: str | None = None
    message: str | None = None


class ContainerInfo(BaseModel):
    container_name: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    location: str | None = None
    sample_id: str | None = None
    service_url: str | None = None
    status: str | None = None


class Session(BaseModel):
    session_id: str | None = None
    dataset: str | None = None
    sample_id: str | None = None
    status: str | None = None
    requested_at: datetime | None = None
    expires_at: datetime | None = None
    created_at: datetime | None = None
    user_id: str | None = None
    duration_seconds: float | None = None
    error: ErrorInfo | None = None
    container_info: ContainerInfo | None = None


class SessionListResponse(BaseModel):
    sessions: list[Session] | None = None
    total_count: int | None = None
    has_more: bool | None = None


class SessionCreateResponse(BaseModel):
    session_id: str | None = None
    status: str | None = None
    expires_at: datetime | None = None


class SessionCloseResponse(BaseModel):
    message: str | None = None
    duration_seconds: float | None = None


class SessionExecuteCommandResponse(BaseModel):
    interaction_id: str | None = None
    status: str | None = None


class Interaction(BaseModel):
    interaction_id: str | None = None
    session_id: str | None = None
    created_at: datetime | None = None
    exit_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    execution_time_seconds: float | None = None
    success: bool | None = None
    message: str | None = None


class SessionStrReplaceResponse(BaseModel):
    success: bool | None = None
    message: str | None = None


class VerificationResult(BaseModel):
    tool: str | None = None
    is_success: bool | None = None
    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None
    total: int | None = None
    execution_duration_seconds: float | None = None
    passes: list[Any] | None = None
    failures: list[Any] | None = None
    skips: list[Any] | None = None
    stdout: str | None = None
    stderr: str | None = None


# --- arguments --------------------------------------------------------------------------------------------------------


class SampleListParams(TypedDict, total=False):
    dataset: str | None
    page: int | None
    page_size: int | None
    search: str | None


class SampleDownloadParams(TypedDict, total=False):
    dataset: Required[str]
    version: int | None


class SessionCreateParams(TypedDict, total=False):
    dataset: Required[str]
    sample_id: Required[str]
    ttl_minutes: int


class SessionExecuteCommandParams(TypedDict, total=False):
    command: Required[str]
    command_timeout: int


class SessionStrReplaceParams(TypedDict, total=False):
    file_path: Required[str]
    str_to_insert: Required[str]
    str_to_replace: Required[str]
