"""Pure: from the result of a run to what goes over the line."""

from __future__ import annotations

from typing import Any

from carrel.execution.executor import ExecutionResult
from carrel.guest.worker import values
from carrel.guest.worker.reprs import safe_repr
from carrel.server.odd_values import escaped
from carrel.server.wire import RunTold, RunUsageTold


def told_run(result: ExecutionResult) -> RunTold:
    """With the value as JSON has it where it does, and exactly, as tagged data."""
    value: Any = result.value
    packed = values.encode(value)
    plain = packed if _plain(packed) else None
    if isinstance(value, values.Repr) and value.why:
        packed = {values.TAG: "repr", "text": str(value), "why": value.why}
    return RunTold(
        value=plain,
        packed=packed,
        value_repr=_repr(result.value),
        stdout=result.stdout,
        stderr=result.stderr,
        error=result.error,
        error_type=result.error_type,
        is_ok=result.is_ok,
        duration=result.duration,
        state=result.state,
        state_reason=result.state_reason,
        display=[_shown(bundle) for bundle in result.display],
        usage=RunUsageTold(cpu_seconds=result.usage.cpu_seconds, max_rss_bytes=result.usage.max_rss_bytes),
    )


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        # Python itself refuses to write a number of thousands of digits.
        return safe_repr(value)


def _plain(packed: Any) -> bool:
    """Whether nothing in it needed a tag."""
    if isinstance(packed, list):
        return all(map(_plain, packed))
    if isinstance(packed, dict):
        return values.TAG not in packed and all(map(_plain, packed.values()))
    return True


def _shown(bundle: dict[str, Any]) -> dict[str, Any]:
    return {
        kind: values.encode(content) if not isinstance(content, str) else escaped(content)
        for kind, content in bundle.items()
    }
