"""`carrel.compat.codeset` has the names, signatures and behavior of codeset 0.9.1."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import codeset as original
import httpx
import httpx2
import pytest
from codeset import types as original_types
from codeset.types import sessions as original_session_types

from carrel import errors as carrel_errors
from carrel.compat import codeset
from carrel.compat.codeset import types
from carrel.compat.codeset.resources import (
    DatasetsResource,
    HealthResource,
    SamplesResource,
    SessionsResource,
    VerifyResource,
)
from carrel.compat.codeset.types import sessions as session_types
from tests.compat.signatures import plain_signature, unchecked
from tests.support.faulty_server import Answer, FaultyServer
from tests.support.server_process import ServerProcess

# --- imports and signatures ------------------------------------------------------------------------------------------

NAMES = (
    "Codeset AsyncCodeset Client AsyncClient BaseModel Timeout NOT_GIVEN not_given Omit omit DEFAULT_TIMEOUT "
    "DEFAULT_MAX_RETRIES APIResponse types CodesetError APIError APIConnectionError APITimeoutError "
    "APIResponseValidationError APIStatusError BadRequestError AuthenticationError PermissionDeniedError NotFoundError "
    "ConflictError UnprocessableEntityError RateLimitError InternalServerError"
)
TYPES = [name for name in dir(original_types) if name[0].isupper()]
SESSION_TYPES = [name for name in dir(original_session_types) if name[0].isupper()]


def test_the_names_are_where_programs_import_them() -> None:
    assert [name for name in NAMES.split() if not hasattr(codeset, name)] == []
    assert len(TYPES) == 18
    assert [name for name in TYPES if not hasattr(types, name)] == []
    assert len(SESSION_TYPES) == 3
    assert [name for name in SESSION_TYPES if not hasattr(session_types, name)] == []
    assert codeset.Client is codeset.Codeset
    assert codeset.AsyncClient is codeset.AsyncCodeset
    assert codeset.DEFAULT_MAX_RETRIES == 0
    assert (codeset.DEFAULT_TIMEOUT.read, codeset.DEFAULT_TIMEOUT.connect) == (300, 5)
    assert not codeset.omit
    assert not codeset.NOT_GIVEN


def test_a_name_that_is_left_out_says_why() -> None:
    missing = [name for name in original.__all__ if not hasattr(original, name) or name.startswith("_")]
    for name in set(original.__all__) - set(codeset.__all__) - set(missing) - {"NoneType"}:
        with pytest.raises(ImportError, match=name):
            getattr(codeset, name)


CLIENT = "api_key=None, base_url=None, timeout=NOT_GIVEN"
EVERY = "extra_headers=None, extra_query=None, extra_body=None, timeout=NOT_GIVEN"
SETTINGS = f"(*, {CLIENT}, max_retries=0, default_headers=None, default_query=None, http_client=None)"
COPY = (
    f"(*, {CLIENT}, http_client=None, max_retries=NOT_GIVEN, default_headers=None, set_default_headers=None, "
    "default_query=None, set_default_query=None)"
)
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (codeset.Codeset, SETTINGS),
    (codeset.AsyncCodeset, SETTINGS),
    (codeset.Codeset.copy, COPY),
    (codeset.Codeset.with_options, COPY),  # type: ignore[misc]
    (codeset.Codeset.close, "()"),
    (codeset.AsyncCodeset.close, "()"),
    (
        SessionsResource.create,
        f"(*, dataset, sample_id, ttl_minutes=omit, poll_interval=3.0, wait_for_ready=True, {EVERY})",
    ),
    (SessionsResource.retrieve, f"(session_id, *, {EVERY})"),
    (SessionsResource.list, f"(*, {EVERY})"),
    (SessionsResource.close, f"(session_id, *, {EVERY})"),
    (
        SessionsResource.execute_command,
        f"(session_id, *, command, command_timeout=omit, poll_interval=3.0, wait_for_completion=True, {EVERY})",
    ),
    (SessionsResource.get_interaction, f"(session_id, interaction_id, *, {EVERY})"),
    (SessionsResource.str_replace, f"(session_id, *, file_path, str_to_insert, str_to_replace, {EVERY})"),
    (VerifyResource.start, f"(session_id, *, poll_interval=3.0, wait_for_completion=True, {EVERY})"),
    (VerifyResource.status, f"(job_id, *, session_id, {EVERY})"),
    (SamplesResource.list, f"(*, dataset=omit, page=omit, page_size=omit, search=omit, {EVERY})"),
    (SamplesResource.download, f"(sample_id, *, dataset, version=omit, {EVERY})"),
    (DatasetsResource.list, f"(*, {EVERY})"),
    (HealthResource.check, f"(*, {EVERY})"),
]


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_the_signatures(function: Any, wanted: str) -> None:
    assert plain_signature(function) == wanted


def test_every_signature_is_checked() -> None:
    checked = [function for function, _ in SIGNATURES]
    resources = (SessionsResource, VerifyResource, SamplesResource, DatasetsResource, HealthResource)
    clients = {codeset.Codeset, codeset.AsyncCodeset, *codeset.Codeset.__bases__}
    found = set(unchecked(checked, *resources, *clients)) - {f"{kind.__name__}.call" for kind in clients}  # internal
    assert found == set()


def test_the_options_of_a_call() -> None:
    with FaultyServer([None]) as server, codeset.Codeset(base_url=server.url, api_key="x") as client:
        unknown: list[dict[str, Any]] = [{"timeouts": 1}, {"options": {}}, {"session_id": "s"}]
        for wrong in unknown:
            with pytest.raises(TypeError, match=next(iter(wrong))):
                client.health.check(**wrong)
        with pytest.raises(TypeError, match="session_id"):
            client.sessions.retrieve()  # type: ignore[call-arg]
        assert server.seen == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SessionsResource, original.resources.SessionsResource),
        (VerifyResource, original.resources.sessions.VerifyResource),
        (SamplesResource, original.resources.SamplesResource),
        (DatasetsResource, original.resources.DatasetsResource),
        (HealthResource, original.resources.HealthResource),
        (codeset.Codeset, original.Codeset),
    ],
)
def test_the_parameters_are_those_of_the_original(ours: type, theirs: type) -> None:
    for name in ("__init__", *(each for each in vars(ours) if each[0] != "_"), "copy"):
        if not callable(getattr(theirs, name, None)) or (theirs is not original.Codeset and name == "__init__"):
            continue
        wanted = inspect.signature(getattr(theirs, name)).parameters
        given = inspect.signature(getattr(ours, name)).parameters
        names = {each for each in wanted if not each.startswith("_")}
        assert set(given) == names, name
        for each in names:
            assert given[each].kind == wanted[each].kind, (name, each)


# --- calls -----------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from codeset import AsyncCodeset, Codeset, CodesetError, NotFoundError, UnprocessableEntityError

def show(model):
    hidden = ("session_id", "interaction_id", "job_id", "user_id", "timestamp", "version")
    fields = sorted(name for name in type(model).model_fields)
    found = {name: getattr(model, name) for name in fields if name not in hidden}
    print(type(model).__name__, {name: plain(value) for name, value in found.items()})

def plain(value):
    if hasattr(value, "model_fields"):
        return {name: plain(getattr(value, name)) for name in sorted(type(value).model_fields)}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return sorted(value)
    return value if isinstance(value, (str, int, bool)) else type(value).__name__

with Codeset(base_url=sys.argv[1], api_key=sys.argv[2]) as client:
    show(client.health.check())
    for dataset in client.datasets.list():
        show(dataset)
    page = client.samples.list(dataset="demo", page=1, page_size=1, search="calc")
    show(page)
    session = client.sessions.create(dataset="demo", sample_id="calc-1", ttl_minutes=10, poll_interval=0.5)
    show(session)
    id = session.session_id
    show(client.sessions.execute_command(session_id=id, command="ls; exit 3", command_timeout=20))
    begun = client.sessions.execute_command(id, command="sleep 4", wait_for_completion=False)
    print(begun.exit_code, client.sessions.get_interaction(id, begun.interaction_id).session_id == id)
    show(client.sessions.str_replace(id, file_path="README.md", str_to_insert="x", str_to_replace="no such text"))
    job = client.sessions.verify.start(session_id=id, poll_interval=0.5)
    status = client.sessions.verify.status(job_id=job.job_id, session_id=id)
    print(status.status, status.result.is_success, sorted(type(status.result).model_fields))
    print(id in [each.session_id for each in client.sessions.list().sessions])
    raw = client.sessions.with_raw_response.retrieve(id)
    print(raw.status_code, raw.headers["content-type"], raw.parse().session_id == id)
    print(client.with_options(timeout=20.0).sessions.retrieve(id, timeout=10).status)
    for wrong in (
        lambda: client.sessions.retrieve("none"),
        lambda: client.sessions.execute_command(id, command=5),
        lambda: client.sessions.close(""),
        lambda: Codeset(base_url=sys.argv[1], api_key="wrong").sessions.list(),
        lambda: Codeset(base_url="http://127.0.0.1:9/api/v1", api_key="x").health.check(),
    ):
        try:
            wrong()
        except CodesetError as problem:
            status = getattr(problem, "status_code", None)
            print(type(problem).__name__, status, sorted(problem.body or ()))
            print(bool(problem.request), bool(problem.message))
        except ValueError as problem:
            print("session_id" in str(problem))
    print(client.sessions.close(session_id=id).message)
    print(client.sessions.retrieve(id).status)

async def main():
    async with AsyncCodeset(base_url=sys.argv[1], api_key=sys.argv[2]) as client:
        session = await client.sessions.create(dataset="demo", sample_id="calc-1", wait_for_ready=False)
        found = await asyncio.gather(*(client.sessions.retrieve(session.session_id) for _ in range(3)))
        print([each.session_id == session.session_id for each in found])
        raw = await client.health.with_raw_response.check()
        print(raw.status_code, (await raw.parse()).status)
        try:
            await client.sessions.retrieve("none")
        except NotFoundError as problem:
            print(problem.response.status_code, sorted(problem.response.json()))
        await client.sessions.close(session.session_id)

asyncio.run(main())
"""


def test_a_program_prints_the_same_as_with_the_original(server: ServerProcess, tmp_path: Path) -> None:
    printed = []
    for name in ("codeset", "carrel.compat.codeset"):
        path = tmp_path / f"{name}.py"
        path.write_text(PROGRAM.replace("from codeset import", f"from {name} import"))
        done = subprocess.run(
            [sys.executable, "-P", str(path), server.url, server.key], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert len(printed[0]) > 20
    assert printed[1] == printed[0]


@pytest.fixture
def client(server: ServerProcess) -> Any:
    with codeset.Codeset(base_url=server.url, api_key=server.key) as client:
        yield client


@pytest.fixture(scope="module")
def session_id(server: ServerProcess) -> Any:
    with codeset.Codeset(base_url=server.url, api_key=server.key) as client:
        id_ = client.sessions.create(dataset="demo", sample_id="calc-1").session_id
        yield id_
        client.sessions.close(id_)


def test_models(client: Any, session_id: str) -> None:
    session = client.sessions.retrieve(session_id=session_id)
    assert isinstance(session, types.Session)
    assert isinstance(session, codeset.BaseModel)
    assert isinstance(session.created_at, datetime)
    assert session.container_info is None
    assert session.to_dict()["lifecycle"] == "live"  # unknown to the original
    sent = session.to_dict()
    assert sent["session_id"] == session_id
    assert isinstance(sent["created_at"], datetime)
    assert isinstance(session.to_dict(mode="json")["created_at"], str)
    assert json.loads(session.to_json())["sample_id"] == "calc-1"
    assert session.to_json(indent=None).count("\n") == 0
    assert "container_info" not in session.to_dict(exclude_none=True)
    assert types.Session(session_id="x").to_dict() == {"session_id": "x"}
    assert types.Session().status is None
    info = types.ContainerInfo.model_fields
    assert set(info) == set(original_types.ContainerInfo.model_fields)


@pytest.mark.parametrize("name", [name for name in TYPES if hasattr(getattr(original_types, name), "model_fields")])
def test_the_fields_are_those_of_the_original(name: str) -> None:
    assert set(getattr(types, name).model_fields) == set(getattr(original_types, name).model_fields)


@pytest.mark.parametrize("name", [name for name in TYPES if name.endswith("Params")])
def test_the_arguments_are_those_of_the_original(name: str) -> None:
    ours, theirs = getattr(types, name), getattr(original_types, name)
    assert set(ours.__annotations__) == set(theirs.__annotations__)
    assert ours.__required_keys__ == {name for name, kind in theirs.__annotations__.items() if "Required" in str(kind)}


def test_the_result_of_a_verification(client: Any, session_id: str) -> None:
    job = client.sessions.verify.start(session_id=session_id)
    assert isinstance(job, session_types.VerifyStatusResponse)
    assert job.status == "completed"
    assert job.result is not None
    assert job.result.is_success is False
    wanted = original_session_types.verify_status_response.Result.model_fields
    assert set(session_types.Result.model_fields) == set(wanted)
    assert client.sessions.verify.status(job_id=job.job_id, session_id=session_id).result == job.result


def test_downloads_are_bytes(client: Any) -> None:
    assert client.samples.download("calc-1", dataset="demo")[:2] == b"\x1f\x8b"


@pytest.mark.parametrize("status", ["error", "closed"])
def test_a_session_that_cannot_be_made_is_returned(status: str) -> None:
    record: dict[str, Any] = {
        "session_id": "s",
        "status": status,
        "expires_at": "2030-01-01T00:00:00Z",
        "dataset": "d",
    }
    record |= {"requested_at": "2030-01-01T00:00:00Z", "error": {"code": "setup_failed", "message": "no disk"}}
    answer = (200, {"Content-Type": "application/json"}, json.dumps(record).encode())
    with FaultyServer([answer]) as server, codeset.Codeset(base_url=server.url, api_key="x") as client:
        session = client.sessions.create(dataset="d", sample_id="s")
        assert (session.status, session.error.message) == (status, "no disk")
        assert json.loads(server.seen[0].body) == {"dataset": "d", "sample_id": "s"}  # nothing that was omitted
        client.sessions.create(dataset="d", sample_id="s", ttl_minutes=5, extra_body={"more": 1})
        assert json.loads(server.seen[-1].body) == {"dataset": "d", "sample_id": "s", "ttl_minutes": 5, "more": 1}


@pytest.mark.parametrize("end", ["completed", "error", "cancelled"])
def test_a_verification_is_waited_for_until_it_has_ended(end: str) -> None:
    job = {"job_id": "j", "session_id": "s", "sample_id": "a", "created_at": "2030-01-01T00:00:00Z"}
    bodies = [json.dumps({**job, "status": status}).encode() for status in ("pending", "running", end, "none more")]
    answers = [(200, {"Content-Type": "application/json"}, body) for body in bodies]
    with FaultyServer(answers) as server, codeset.Codeset(base_url=server.url, api_key="x") as client:
        ended = client.sessions.verify.start(session_id="s", poll_interval=0.01)
        assert (ended.status, ended.result) == (end, None)
        assert len(server.seen) == 3


def test_a_command_that_cannot_be_run() -> None:
    record: dict[str, Any] = {"interaction_id": "i", "session_id": "s", "created_at": "2030-01-01T00:00:00Z"}
    record |= {"exit_code": -1000, "message": "the sandbox is gone"}
    answer = (200, {"Content-Type": "application/json"}, json.dumps(record).encode())
    with (
        FaultyServer([answer]) as server,
        codeset.Codeset(base_url=server.url, api_key="x") as client,
        pytest.raises(codeset.CodesetError, match="the sandbox is gone") as caught,
    ):
        client.sessions.execute_command("s", command="ls")
    assert isinstance(caught.value, carrel_errors.CommandNotRun)


def test_the_time_limit_of_a_call(client: Any, session_id: str) -> None:
    with pytest.raises(TimeoutError) as caught:
        client.sessions.execute_command(session_id, command="sleep 20", timeout=0.4, command_timeout=5)
    assert not isinstance(caught.value, codeset.CodesetError)


def test_an_empty_id_sends_nothing() -> None:
    with FaultyServer([None]) as server, codeset.Codeset(base_url=server.url, api_key="x") as client:
        for call in (client.sessions.retrieve, client.sessions.close, client.sessions.verify.start):
            with pytest.raises(ValueError, match="session_id"):
                call("")
        assert server.seen == []


# --- errors ----------------------------------------------------------------------------------------------------------

STATUSES = {
    400: ("BadRequestError", carrel_errors.RequestRefused),
    401: ("AuthenticationError", carrel_errors.KeyNotAccepted),
    403: ("PermissionDeniedError", carrel_errors.KeyNotAccepted),
    404: ("NotFoundError", carrel_errors.NotFoundThere),
    409: ("ConflictError", carrel_errors.NotNow),
    418: ("APIStatusError", carrel_errors.RemoteError),
    422: ("UnprocessableEntityError", carrel_errors.RequestRefused),
    429: ("RateLimitError", carrel_errors.TooMany),
    500: ("InternalServerError", carrel_errors.ServerFailed),
    503: ("InternalServerError", carrel_errors.ServerFailed),
}
BODIES = [
    (b'{"detail": "why", "code": "SessionNotFound"}', {"detail": "why", "code": "SessionNotFound"}),
    (b"plain", "plain"),
    (b"", None),
]


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(("sent", "body"), BODIES)
def test_the_error_of_a_status(status: int, sent: bytes, body: object) -> None:
    name, own = STATUSES[status]
    with (
        FaultyServer([(status, {"Retry-After": "7"}, sent)]) as server,
        codeset.Codeset(base_url=server.url, api_key="x") as client,
        pytest.raises(codeset.APIStatusError) as caught,
    ):
        client.sessions.retrieve("s")
    error = caught.value
    assert type(error).__name__ == name
    assert isinstance(error, own)
    assert isinstance(error, codeset.APIError)
    assert (error.status_code, error.body, error.retry_after) == (status, body, 7.0)
    assert error.message == str(error)
    assert error.response.status_code == status
    assert error.response.headers["retry-after"] == "7"
    assert error.response.text == sent.decode()
    assert "/sessions/s" in str(error.request.url)
    assert len(server.seen) == 1  # no retries by default


def test_how_errors_are_made() -> None:
    request = httpx2.Request("GET", "http://x")
    response = httpx2.Response(409, request=request)
    error = codeset.APIError("m", request, body={"a": 1})
    assert (error.message, error.request, error.body, str(error)) == ("m", request, {"a": 1}, "m")
    conflict = codeset.ConflictError("m", response=response, body=None)
    assert (conflict.response, conflict.status_code, conflict.request) == (response, 409, request)
    assert codeset.AuthenticationError("m", response=response, body=None).message == "m"
    assert codeset.APIConnectionError(request=request).body is None
    assert isinstance(codeset.APITimeoutError(request), codeset.APIConnectionError)
    assert codeset.APIResponseValidationError(response, None).status_code == 409
    for name in NAMES.split():
        theirs = getattr(original, name)
        if inspect.isclass(theirs) and issubclass(theirs, Exception):
            bases = [each.__name__ for each in theirs.__mro__ if each.__module__ == "codeset"]
            assert [base.__name__ for base in getattr(codeset, name).__mro__ if base.__name__ in bases] == bases


def test_no_connection_and_no_answer_in_time() -> None:
    with codeset.Codeset(base_url="http://127.0.0.1:9", api_key="x") as client:
        with pytest.raises(codeset.APIConnectionError) as caught:
            client.health.check()
        assert isinstance(caught.value, carrel_errors.ServerUnreachable)
        assert caught.value.request.method == "GET"
        assert caught.value.body is None

    def slow(request: object) -> None:
        import time  # noqa: PLC0415

        time.sleep(1)

    with (
        FaultyServer([slow]) as server,
        codeset.Codeset(base_url=server.url, api_key="x", timeout=0.2) as client,
        pytest.raises(codeset.APITimeoutError),
    ):
        client.health.check()


def test_an_answer_that_is_not_understood() -> None:
    with (
        FaultyServer([(200, {}, b"<html>")]) as server,
        codeset.Codeset(base_url=server.url, api_key="x") as client,
        pytest.raises(codeset.APIResponseValidationError) as caught,
    ):
        client.health.check()
    assert caught.value.body == "<html>"


def test_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CODESET_API_KEY", "CARREL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with FaultyServer([(401, {}, b"")]) as server, codeset.Codeset(base_url=server.url) as client:
        with pytest.raises(TypeError, match="CODESET_API_KEY"):
            client.health.check()
        assert server.seen == []
        with pytest.raises(codeset.AuthenticationError):
            client.health.check(extra_headers={"Authorization": "Bearer y"})


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CODESET_BASE_URL", "CARREL_BASE_URL", "CODESET_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CARREL_API_KEY", "second")
    assert str(codeset.Codeset().base_url) == "http://127.0.0.1:8765/api/v1/"
    assert codeset.Codeset().api_key == "second"
    monkeypatch.setenv("CARREL_BASE_URL", "http://second/api/v1")
    assert str(codeset.Codeset().base_url) == "http://second/api/v1/"
    monkeypatch.setenv("CODESET_BASE_URL", "http://first/api/v1/")
    monkeypatch.setenv("CODESET_API_KEY", "first")
    client = codeset.Codeset()
    assert (str(client.base_url), client.api_key) == ("http://first/api/v1/", "first")
    client = codeset.Codeset(base_url="http://given", api_key="given")
    assert (str(client.base_url), client.api_key) == ("http://given/api/v1/", "given")
    assert (client.timeout, client.max_retries) == (codeset.DEFAULT_TIMEOUT, 0)


def test_copies() -> None:
    client = codeset.Codeset(base_url="http://one", api_key="k", default_headers={"a": "1"}, max_retries=2)
    other = client.copy(timeout=codeset.Timeout(7.0), default_headers={"b": "2"}, default_query={"q": "1"})
    assert (other.api_key, other.base_url, other.max_retries) == ("k", client.base_url, 2)
    assert isinstance(other.timeout, codeset.Timeout)
    assert other.timeout.read == 7
    assert client.with_options(max_retries=5, api_key="other").api_key == "other"
    answer: Answer = (200, {}, b'{"service": "s", "status": "ok", "timestamp": "t", "version": "1"}')
    with FaultyServer([answer]) as server:
        other.copy(base_url=server.url).health.check(extra_query={"r": 2})
        other.copy(base_url=server.url, set_default_headers={"c": "3"}, set_default_query={}).health.check()
        first, second = server.seen
    headers = {name.lower(): value for name, value in first.headers.items()}
    assert (headers["a"], headers["b"], headers["authorization"]) == ("1", "2", "Bearer k")
    assert first.path.endswith("/health?q=1&r=2")
    headers = {name.lower(): value for name, value in second.headers.items()}
    assert headers["c"] == "3"
    assert "a" not in headers
    assert "?" not in second.path
    with pytest.raises(ValueError, match="not both"):
        client.copy(default_headers={}, set_default_headers={})


def test_the_http_client() -> None:
    with pytest.raises(TypeError, match=r"httpx2\.Client"):
        codeset.Codeset(api_key="x", http_client=httpx.Client())
    with pytest.raises(TypeError, match=r"httpx2\.AsyncClient"):
        codeset.AsyncCodeset(api_key="x", http_client=httpx2.Client())
    with httpx2.Client(headers={"mine": "1"}) as http, FaultyServer([(404, {}, b"")]) as server:
        client = codeset.Codeset(api_key="x", base_url=server.url, http_client=http)
        with pytest.raises(codeset.NotFoundError):
            client.health.check()
        assert server.seen[0].headers["mine"] == "1"


def test_raw_responses_of_the_client(client: Any, session_id: str) -> None:
    raw = client.with_raw_response.sessions.execute_command(session_id, command="echo hi")
    assert isinstance(raw, codeset.APIResponse)
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().stdout == "hi\n"
