"""What a server refuses becomes an error that says what happened, to what, and what to do."""

import json

import pytest

from carrel import errors
from carrel.client.errors import error_from, exception_named, retry_after
from carrel.errors import (
    ForkRefused,
    KeyNotAccepted,
    NotFoundThere,
    NotNow,
    RemoteError,
    RequestRefused,
    ServerFailed,
    SessionNotFound,
    SetupFailed,
    TooMany,
)


def refused(status: int, detail: object = None, **headers: str) -> Exception:
    body = b"" if detail is None else json.dumps(detail).encode()
    return error_from(status, body, {name.replace("_", "-"): value for name, value in headers.items()}, "do it")


@pytest.mark.parametrize(
    ("status", "error", "builtin"),
    [
        (400, RequestRefused, ValueError),
        (401, KeyNotAccepted, PermissionError),
        (403, KeyNotAccepted, PermissionError),
        (404, NotFoundThere, KeyError),
        (409, NotNow, RuntimeError),
        (413, RequestRefused, ValueError),
        (418, RemoteError, RuntimeError),
        (422, RequestRefused, ValueError),
        (429, TooMany, RuntimeError),
        (500, ServerFailed, RuntimeError),
        (503, ServerFailed, RuntimeError),
    ],
)
def test_each_status_has_its_error(status: int, error: type[RemoteError], builtin: type[Exception]) -> None:
    found = refused(status, {"detail": "so it is"})
    assert type(found) is error
    assert isinstance(found, builtin)
    assert isinstance(found, RemoteError)
    assert (found.status_code, found.detail) == (status, "so it is")
    assert str(found).startswith("do it: so it is")


def test_a_missing_key_has_a_hint() -> None:
    assert str(refused(401, {"detail": "no key"})) == "do it: no key. Give api_key= or set CARREL_API_KEY."


def test_invalid_fields_are_named() -> None:
    wrong = [{"loc": ["body", "command"], "msg": "Field required", "type": "missing"}, {"msg": "bad"}, "odd"]
    assert str(refused(422, {"detail": wrong})) == "do it: body.command: Field required; bad; odd"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "do it: no reason given (HTTP 500)"),
        (b"<h1>Bad gateway</h1>", "do it: <h1>Bad gateway</h1>"),
        (b"\xff\xfe", "do it: \ufffd\ufffd"),
        (b"[1, 2]", "do it: 1; 2"),
        (b'{"other": 1}', "do it: no reason given (HTTP 500)"),
        (b'{"detail": {"message": "full", "code": 7}}', "do it: full"),
        (b'{"detail": null, "code": null}', "do it: no reason given (HTTP 500)"),
    ],
)
def test_any_body_becomes_an_error(body: bytes, words: str) -> None:
    assert str(error_from(500, body, {}, "do it")) == words


def test_long_messages_are_cut() -> None:
    assert len(str(refused(500, {"detail": "x" * 100_000}))) < 3000


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (404, "SessionNotFound", SessionNotFound),
        (404, "FileNotFoundError", FileNotFoundError),
        (409, "ForkRefused", ForkRefused),
        (409, "setup_failed", SetupFailed),
        (409, "IsADirectoryError", IsADirectoryError),
    ],
)
def test_errors_of_the_session_are_raised_with_their_class(status: int, code: str, error: type[Exception]) -> None:
    found = refused(status, {"detail": "why", "code": code})
    assert type(found) is error
    assert "why" in str(found)
    assert isinstance(found.__cause__, RemoteError)
    assert found.__cause__.status_code == status


@pytest.mark.parametrize("code", ["", "SystemExit", "KeyboardInterrupt", "__class__", "os.system", "Exception"])
def test_unknown_error_names_are_ignored(code: str) -> None:
    assert exception_named(code) is None
    assert type(refused(404, {"detail": "x", "code": code})) is NotFoundThere


@pytest.mark.parametrize(("status", "error"), [(401, KeyNotAccepted), (429, TooMany), (503, ServerFailed)])
def test_failures_of_the_server_are_not_errors_of_the_session(status: int, error: type[RemoteError]) -> None:
    assert type(refused(status, {"detail": "x", "code": "SessionBusy"})) is error


def test_every_error_can_be_created_from_its_message() -> None:
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.CarrelError):
            assert type(refused(409, {"detail": "x", "code": name})) in (error, NotNow)


@pytest.mark.parametrize(
    ("detail", "seconds"),
    [("5", 5.0), ("0.5", 0.5), ("", None), ("-1", None), ("inf", None), ("nan", None)],
)
def test_retry_after(detail: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": detail}) == seconds
    error = refused(429, {"detail": "full"}, retry_after=detail)
    assert isinstance(error, TooMany)
    assert error.retry_after == seconds
