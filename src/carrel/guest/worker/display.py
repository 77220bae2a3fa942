"""Rich forms of a value: what a notebook would display, by MIME type."""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import Any

MAX_BUNDLE = 8 * 1024 * 1024
MAX_TOTAL = 16 * 1024 * 1024
_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
}
_PLAIN = (str, int, float, complex, bytes, list, tuple, dict, set, frozenset, type)

Bundle = dict[str, Any]


class DisplayedBundles:
    """What one cell displays, in order, up to a size that fits into its result."""

    def __init__(self) -> None:
        self.bundles: list[Bundle] = []
        self._left = MAX_TOTAL

    def add(self, value: Any) -> bool:
        """Display a value; False when it has no rich form."""
        found = bundle(value)
        if found is not None:
            self._keep(found)
        return found is not None

    def add_open_figures(self) -> None:
        """The figures that pyplot holds open, drawn and closed, as a notebook does after each cell."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            picture = _draw(pyplot.figure(number))
            if picture is not None:
                self._keep({"image/png": _sendable(picture)})
        pyplot.close("all")

    def _keep(self, found: Bundle) -> None:
        size = len(json.dumps(found))
        self._left -= size
        if self._left < 0:
            found = {"text/plain": f"not shown: {size} bytes are more than a result can carry"}
        self.bundles.append(found)


def bundle(value: Any) -> Bundle | None:
    """The value's rich forms, or None when it has none."""
    if value is None or isinstance(value, _PLAIN):
        return None
    found: Bundle = {}
    mimebundle = _call_method(value, "_repr_mimebundle_")
    if isinstance(mimebundle, tuple) and mimebundle:
        mimebundle = mimebundle[0]
    if isinstance(mimebundle, dict):
        found.update({kind: data for kind, data in mimebundle.items() if type(kind) is str})
    for method, kind in _METHODS.items():
        # One picture is enough: an image would draw itself as PNG and as JPEG.
        if kind not in found and not (kind == "image/jpeg" and found.get("image/png")):
            found[kind] = _call_method(value, method)
    if type(value).__module__.startswith("matplotlib.") and hasattr(value, "savefig"):
        found["image/png"] = _draw(value)
        _close(value)
    sendable = {kind: _sendable(data) for kind, data in found.items()}
    return {kind: data for kind, data in sendable.items() if data is not None} or None


def _call_method(value: Any, method: str) -> Any:
    try:
        function = getattr(type(value), method, None)
        return function(value) if callable(function) else None
    except Exception:  # noqa: BLE001 - the object's own code; it then has no such form
        return None


def _sendable(data: Any) -> Any:
    """Text as it is, bytes as base64, JSON data as it is; None for what cannot be sent."""
    if isinstance(data, (bytes, bytearray)):
        return base64.b64encode(data).decode("ascii") if len(data) <= MAX_BUNDLE else None
    if isinstance(data, str):
        return str.__str__(data) if len(data) <= MAX_BUNDLE else None
    if not isinstance(data, (dict, list)):
        return None
    try:
        text = json.dumps(data)
        return json.loads(text) if len(text) <= MAX_BUNDLE else None
    except (TypeError, ValueError, RecursionError):
        return None


def _draw(figure: Any) -> bytes | None:
    try:
        out = io.BytesIO()
        figure.savefig(out, format="png", bbox_inches="tight")
        return out.getvalue()
    except Exception:  # noqa: BLE001 - a figure that cannot be drawn has no picture
        return None


def _close(figure: Any) -> None:
    """It has been displayed: pyplot does not need to keep it open."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
