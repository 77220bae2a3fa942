"""Numbers about the server, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """One registry of its own, so that two servers in one process do not count for each other."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "carrel_http_requests", "Requests answered", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "carrel_http_request_seconds", "Until answered", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self.sessions = Counter("carrel_sessions_created", "Sessions asked for", registry=self._registry)
        self.commands = Counter("carrel_commands", "Commands asked for", registry=self._registry)
        self.runs = Counter("carrel_runs", "Runs of code asked for", registry=self._registry)
        self.verifications = Counter("carrel_verifications", "Verifications asked for", registry=self._registry)
        self._alive = Gauge("carrel_sessions_alive", "Sessions being made or ready", registry=self._registry)

    def watch_alive(self, count: Callable[[], float]) -> None:
        self._alive.set_function(count)

    def asked(self, method: str, route: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS") else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
