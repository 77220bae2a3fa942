"""Rich forms of a value: what a notebook would show of it, by MIME type."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

LARGEST = 8 * 1024 * 1024
_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
}


def bundle(value: Any) -> dict[str, Any] | None:
    """The value's rich forms, or None when it has none."""
    if value is None or isinstance(value, (str, int, float, bytes, list, tuple, dict, set, type)):
        return None
    found: dict[str, Any] = {}
    mimebundle = _asked(value, "_repr_mimebundle_")
    if isinstance(mimebundle, tuple) and mimebundle:
        mimebundle = mimebundle[0]
    if isinstance(mimebundle, dict):
        found.update({kind: data for kind, data in mimebundle.items() if isinstance(kind, str)})
    for method, kind in _METHODS.items():
        if kind not in found:
            found[kind] = _asked(value, method)
    if type(value).__module__.startswith("matplotlib.") and hasattr(value, "savefig"):
        found["image/png"] = _drawn(value)
    found = {kind: _text(data) for kind, data in found.items() if data is not None}
    return {kind: data for kind, data in found.items() if data is not None} or None


def _asked(value: Any, method: str) -> Any:
    try:
        ask = getattr(type(value), method, None)
        return ask(value) if callable(ask) else None
    except Exception:  # noqa: BLE001 - the object's own code; it then has no such form
        return None


def _text(data: Any) -> Any:
    if isinstance(data, (bytes, bytearray)):
        data = base64.b64encode(bytes(data)).decode("ascii")
    if isinstance(data, str):
        return data if len(data) <= LARGEST else None
    return data if isinstance(data, (dict, list)) else None


def _drawn(figure: Any) -> bytes | None:
    try:
        out = io.BytesIO()
        figure.savefig(out, format="png", bbox_inches="tight")
        return out.getvalue()
    except Exception:  # noqa: BLE001 - a figure that cannot be drawn has no picture
        return None


def open_figures() -> list[dict[str, Any]]:
    """The figures that pyplot holds open, drawn and closed, as a notebook does after each cell."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    drawn = []
    for number in pyplot.get_fignums():
        picture = _drawn(pyplot.figure(number))
        if picture is not None:
            drawn.append({"image/png": _text(picture)})
    pyplot.close("all")
    return drawn
