"""Pure: where arguments go in a request, and what is refused there."""

import json
from typing import Any
from urllib.parse import parse_qsl

import pytest

from carrel.errors import ToolCallError
from carrel.library.tools.http_request import ApiOperation, HttpRequest, Location, RequestParameter, build_request


def made(part: RequestParameter, value: Any, path: str = "/x") -> HttpRequest:
    return build_request(ApiOperation("GET", path, (part,)), {"p": value})


def path_of(value: Any, style: str = "simple", explode: bool = False) -> str:
    return made(RequestParameter("p", "p", "path", style=style, explode=explode), value, "/a/{p}/b").path.split("/")[2]


# The examples of OpenAPI 3.1, "Style Examples".
COLORS = ["blue", "black", "brown"]
RGB = {"R": 100, "G": 200, "B": 150}


@pytest.mark.parametrize(
    ("style", "explode", "of_list", "of_object"),
    [
        ("simple", False, "blue,black,brown", "R,100,G,200,B,150"),
        ("simple", True, "blue,black,brown", "R=100,G=200,B=150"),
        ("label", False, ".blue,black,brown", ".R,100,G,200,B,150"),
        ("label", True, ".blue.black.brown", ".R=100.G=200.B=150"),
        ("matrix", False, ";p=blue,black,brown", ";p=R,100,G,200,B,150"),
        ("matrix", True, ";p=blue;p=black;p=brown", ";R=100;G=200;B=150"),
    ],
)
def test_path_styles(style: str, explode: bool, of_list: str, of_object: str) -> None:
    assert path_of(COLORS, style, explode) == of_list
    assert path_of(RGB, style, explode) == of_object


@pytest.mark.parametrize(
    ("style", "explode", "value", "expected"),
    [
        ("form", True, COLORS, [("p", "blue"), ("p", "black"), ("p", "brown")]),
        ("form", False, COLORS, [("p", "blue,black,brown")]),
        ("form", True, RGB, [("R", "100"), ("G", "200"), ("B", "150")]),
        ("form", False, RGB, [("p", "R,100,G,200,B,150")]),
        ("spaceDelimited", False, COLORS, [("p", "blue black brown")]),
        ("pipeDelimited", False, COLORS, [("p", "blue|black|brown")]),
        ("deepObject", True, RGB, [("p[R]", "100"), ("p[G]", "200"), ("p[B]", "150")]),
        ("deepObject", True, {"a": {"b": [1, 2]}}, [("p[a][b]", "1"), ("p[a][b]", "2")]),
        ("deepObject", True, {"a": [{"b": 1}, None]}, [("p[a][0][b]", "1")]),
        ("deepObject", True, ["x", {"y": [2]}], [("p[0]", "x"), ("p[1][y][0]", "2")]),
        ("form", True, True, [("p", "true")]),
        ("form", True, 1.5, [("p", "1.5")]),
        ("form", True, "a b&c", [("p", "a b&c")]),
        ("form", True, None, []),
    ],
)
def test_query_styles(style: str, explode: bool, value: Any, expected: list[tuple[str, str]]) -> None:
    assert made(RequestParameter("p", "p", "query", style=style, explode=explode), value).query == expected


def test_a_value_cannot_change_the_path() -> None:
    assert path_of("../../admin?x=1#y") == "..%2F..%2Fadmin%3Fx%3D1%23y"
    assert path_of("ä/ö") == "%C3%A4%2F%C3%B6"
    for word in ("", ".", ".."):
        with pytest.raises(ToolCallError, match="p cannot be"):
            path_of(word)


def test_a_value_that_is_a_path_keeps_its_slashes() -> None:
    part = RequestParameter("p", "p", "path", style="simple", explode=False, whole_path=True)
    assert made(part, "/subscriptions/7/a b?", "/{p}/x").path == "/subscriptions/7/a%20b%3F/x"
    for text in ("a/../b", "a//b", "/", ".."):
        with pytest.raises(ToolCallError, match="p cannot be"):
            made(part, text, "/{p}/x")


def test_a_value_cannot_add_a_header() -> None:
    assert made(RequestParameter("p", "X-P", "header"), ["a", 1]).headers == {"X-P": "a,1"}
    for text in ("a\r\nX-Other: 1", "a\x00", "ä"):
        with pytest.raises(ToolCallError, match="p cannot be"):
            made(RequestParameter("p", "X-P", "header"), text)
    assert made(RequestParameter("p", "p", "cookie"), "a; b=c").headers == {"Cookie": "p=a%3B%20b%3Dc"}


def body(content_type: str, arguments: dict[str, Any], place: Location = "body") -> HttpRequest:
    return build_request(
        ApiOperation("POST", "/", tuple(RequestParameter(name, name, place) for name in arguments), content_type),
        arguments,
    )


def test_bodies() -> None:
    sent = body("application/json", {"a": 1, "b": None, "c": b"\x00"})
    assert json.loads(sent.content or b"") == {"a": 1, "b": None, "c": "AA=="}
    assert sent.headers == {"Content-Type": "application/json"}
    assert body("application/x-www-form-urlencoded", {"a": "x y", "b": [1, 2]}).content == b"a=x+y&b=1&b=2"
    assert body("application/json", {"p": [1, 2]}, "payload").content == b"[1, 2]"
    assert body("text/csv", {"p": "a,b"}, "payload").content == b"a,b"
    assert body("application/octet-stream", {"p": b"\xff"}, "payload").content == b"\xff"
    assert build_request(ApiOperation("POST", "/", (RequestParameter("a", "a", "body"),)), {}).content is None
    with pytest.raises(ToolCallError, match="cannot be written as JSON"):
        body("application/json", {"a": float("nan")})


def test_multipart_bodies() -> None:
    sent = body("multipart/form-data", {"title": "x", "file": b"\x00--boundary"})
    boundary = sent.headers["Content-Type"].partition("boundary=")[2]
    assert sent.content is not None
    pieces = sent.content.split(f"--{boundary}".encode())
    assert pieces[1] == b'\r\nContent-Disposition: form-data; name="title"\r\n\r\nx\r\n'
    assert pieces[2].endswith(b'filename="file"\r\nContent-Type: application/octet-stream\r\n\r\n\x00--boundary\r\n')
    assert pieces[3] == b"--\r\n"


def test_encodings_of_form_fields() -> None:
    given = {"card": {"number": 4, "tags": ["a", "b"]}, "to": {"name": "x"}, "ids": [1, 2], "expand": ["y"]}
    parts = tuple(RequestParameter(name, name, "body") for name in given)
    deep = {name: RequestParameter(name, name, "body", style="deepObject") for name in ("card", "expand")}
    fields = {**deep, "ids": RequestParameter("ids", "ids", "body", explode=False)}
    form = ApiOperation("POST", "/", parts, "application/x-www-form-urlencoded", fields)
    assert parse_qsl((build_request(form, given).content or b"").decode()) == [
        ("card[number]", "4"),
        ("card[tags][0]", "a"),
        ("card[tags][1]", "b"),
        ("to", '{"name": "x"}'),
        ("ids", "1,2"),
        ("expand[0]", "y"),
    ]
    kinds = {
        "card": RequestParameter("card", "card", "body", content_type="application/vnd.card+json"),
        "expand": deep["expand"],
    }
    sent = build_request(ApiOperation("POST", "/", parts, "multipart/form-data", kinds), given).content or b""
    for piece in (
        b'name="card"\r\nContent-Type: application/vnd.card+json\r\n\r\n{"number"',
        b'name="to"\r\nContent-Type: application/json\r\n\r\n{"name": "x"}',
        b'name="ids"\r\n\r\n2\r\n',
        b'name="expand[0]"\r\n\r\ny\r\n',
    ):
        assert piece in sent


def test_a_query_in_the_path_is_sent() -> None:
    parts = (RequestParameter("city", "city", "path", style="simple"), RequestParameter("days", "days", "query"))
    request = build_request(ApiOperation("GET", "/now?op=all&city={city}#more", parts), {"city": "a&b=c", "days": 2})
    assert (request.path, request.query) == ("/now", [("op", "all"), ("city", "a&b=c"), ("days", "2")])


def test_defaults_are_sent() -> None:
    operation = ApiOperation(
        "GET", "/", (RequestParameter("a", "a", "query"), RequestParameter("b", "b", "query", default=7))
    )
    assert build_request(operation, {}).query == [("b", "7")]
    assert build_request(operation, {"b": 8}).query == [("b", "8")]


@pytest.mark.parametrize("explode", [False, True])
@pytest.mark.parametrize("value", [".", "", [], {}])
def test_a_label_cannot_change_the_path(value: Any, explode: bool) -> None:
    with pytest.raises(ToolCallError, match="because it would change the path"):
        path_of(value, "label", explode)


def test_a_label_of_empty_texts_cannot_change_the_path() -> None:
    with pytest.raises(ToolCallError, match="because it would change the path"):
        path_of(["", ""], "label", True)
    assert path_of(["", ""], "label") == ".,"
