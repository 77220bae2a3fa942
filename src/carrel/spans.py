"""Steps as OpenTelemetry spans, by the conventions for generative AI; for who has the `otel` extra installed."""

import sys
from typing import Any

from carrel.trace import Step

_OPERATIONS = {"tool": "execute_tool", "workflow": "execute_tool", "run": "execute_tool"}


class Spans:
    """One span per step, below the span of the step it happened in, or else below the caller's own."""

    def __init__(self, session_id: str, tracer: Any) -> None:
        self._session_id = session_id
        self._tracer = tracer
        self._open: dict[str, Any] = {}

    def begun(self, step: Step) -> None:
        from opentelemetry import trace  # noqa: PLC0415 -- an extra; whoever made this object has it

        above = self._open.get(step.parent.id) if step.parent is not None else None
        context = trace.set_span_in_context(above) if above is not None else None
        called = "run_code" if step.kind == "run" else step.name
        attributes: dict[str, Any] = {
            "gen_ai.conversation.id": self._session_id,
            "carrel.step.kind": step.kind,
            "carrel.step.id": step.id,
        }
        operation = _OPERATIONS.get(step.kind)
        if operation is not None:
            attributes |= {
                "gen_ai.operation.name": operation,
                "gen_ai.tool.name": called,
                "gen_ai.tool.type": "function" if step.kind == "tool" else "extension",
                "gen_ai.tool.call.id": step.id,
            }
        name = f"{operation} {called}" if operation else f"{step.kind} {step.name}"
        start = int(step.started * 1e9)
        self._open[step.id] = self._tracer.start_span(name, context=context, attributes=attributes, start_time=start)

    def ended(self, step: Step) -> None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

        span = self._open.pop(step.id, None)
        if span is None:
            return
        for size, number in step.sizes.items():
            span.set_attribute(f"carrel.size.{size}", number)
        if step.outcome != "ok":
            span.set_attribute("error.type", step.error_type or step.outcome or "error")
            span.set_status(Status(StatusCode.ERROR, step.error))
        span.end(int((step.started + step.duration) * 1e9))


def spans(session_id: str) -> Spans | None:
    """For the tracer that the program has set up; None in a program that has nothing to do with OpenTelemetry."""
    # Whoever has set up a tracer has loaded this module; nobody else pays for loading it.
    trace = sys.modules.get("opentelemetry.trace")
    return Spans(session_id, trace.get_tracer("carrel")) if trace is not None else None
