"""The OpenAPI schema of the server: FastAPI's own, with descriptions of the groups and of the fields."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from carrel.wire import answers, requests, verification

GROUPS = {
    "server": "The server itself.",
    "datasets": "Which samples a session can be created from.",
    "sessions": (
        "The life of a session: created, forked, rewound, paused, resumed, closed. A session is `creating` until it is "
        "`ready` or `error`. An id that is unknown, or of another user's session, is a 404 `SessionNotFound`. What "
        "needs a live session is a 409 `SessionNotReady` before it is ready and after it has ended."
    ),
    "commands": (
        "Shell commands in the session's workspace. Several can run side by side. The errors are those of sessions; an "
        "unknown `interaction_id` is a 404 `InteractionNotFound`."
    ),
    "code": (
        "The session's live Python. Runs wait for each other; commands and files do not wait for them. An error of the "
        "code is no error of the request: the answer is 200, with `is_ok: false`. The errors are those of sessions."
    ),
    "files": (
        "The session's workspace. Paths are relative to it. A missing file is a 404 `FileNotFoundError`; a path that "
        "is not possible is a 422."
    ),
    "verification": (
        "Verdicts on the work in a session that was created from a sample; any other session is a 409. An unknown "
        "`job_id` is a 404 `JobNotFound`."
    ),
    "conversation": "What is recorded of a session. It can be read after the session has ended.",
    "approvals": "Tool calls that wait for a person's decision.",
}
"""The tags of the routes, in the order of the reference, each with a description."""


def operation_id(route: APIRoute) -> str:
    """Return the name of the function; generated clients call their methods so."""
    return route.name


def describe_fields(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Return a replacement for `app.openapi` that adds the docstrings of the models' fields."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        is_new = app.openapi_schema is None
        schema = plain()
        if is_new:
            for module in (answers, requests, verification):
                _add_descriptions(schema["components"]["schemas"], module)
        return schema

    return openapi


def _add_descriptions(schemas: dict[str, Any], module: ModuleType) -> None:
    found = _field_docstrings(module)
    for name, model in vars(module).items():
        fields = schemas.get(name, {}).get("properties", {})
        for base in getattr(model, "__mro__", ()):
            for field, text in found.get(base.__name__, {}).items():
                if field in fields:
                    fields[field].setdefault("description", text)


def _field_docstrings(module: ModuleType) -> dict[str, dict[str, str]]:
    """Return the texts below the fields of each class, which Python does not keep."""
    return {
        item.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(item.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for item in ast.parse(inspect.getsource(module)).body
        if isinstance(item, ast.ClassDef)
    }
