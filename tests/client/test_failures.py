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


def refused(status: int, said: object = None, **headers: str) -> Exception:
    body = b"" if said is None else json.dumps(said).encode()
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
def test_each_number_has_its_error(status: int, error: type[RemoteError], builtin: type[Exception]) -> None:
    found = refused(status, {"detail": "so it is"})
    assert type(found) is error
    assert isinstance(found, builtin)
    assert isinstance(found, RemoteError)
    assert (found.status_code, found.detail) == (status, "so it is")
    assert str(found).startswith("do it: so it is")


def test_without_a_key_it_says_where_to_put_one() -> None:
    assert str(refused(401, {"detail": "no key"})) == "do it: no key. Give api_key= or set CARREL_API_KEY."


def test_wrong_fields_are_named() -> None:
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
def test_whatever_the_body_is_there_is_an_error(body: bytes, words: str) -> None:
    assert str(error_from(500, body, {}, "do it")) == words


def test_long_words_are_cut() -> None:
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
def test_an_error_that_is_named_is_raised_as_it_would_be_here(status: int, code: str, error: type[Exception]) -> None:
    found = refused(status, {"detail": "why", "code": code})
    assert type(found) is error
    assert "why" in str(found)
    assert isinstance(found.__cause__, RemoteError)
    assert found.__cause__.status_code == status


@pytest.mark.parametrize("code", ["", "SystemExit", "KeyboardInterrupt", "__class__", "os.system", "Exception"])
def test_a_name_that_is_no_error_of_ours_is_not_taken(code: str) -> None:
    assert exception_named(code) is None
    assert type(refused(404, {"detail": "x", "code": code})) is NotFoundThere


@pytest.mark.parametrize(("status", "error"), [(401, KeyNotAccepted), (429, TooMany), (503, ServerFailed)])
def test_what_the_server_itself_cannot_do_is_no_error_of_a_session(status: int, error: type[RemoteError]) -> None:
    assert type(refused(status, {"detail": "x", "code": "SessionBusy"})) is error


def test_every_error_that_a_server_may_name_can_be_made_from_its_words() -> None:
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.CarrelError):
            assert type(refused(409, {"detail": "x", "code": name})) in (error, NotNow)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("5", 5.0), ("0.5", 0.5), ("", None), ("-1", None), ("inf", None), ("nan", None)],
)
def test_when_to_ask_again(said: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": said}) == seconds
    told = refused(429, {"detail": "full"}, retry_after=said)
    assert isinstance(told, TooMany)
    assert told.retry_after == seconds
