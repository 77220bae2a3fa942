"""Client: the same calls from a program that waits by blocking; each stands on the coroutine of the same name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from typing import Any, Self, Unpack

import httpx2
from pydantic import PrivateAttr

from carrel.client.answers import SessionRecord
from carrel.client.asking import typed
from carrel.client.blocking import blocking, blocking_stream, finished
from carrel.client.line import Asked, BlockingLine, Options, Wire, address, headers_for, http_settings
from carrel.client.offers import DatasetOffers, HealthCheck, SampleOffers
from carrel.client.sessions import Sessions
from carrel.client.verbs import Unbound, Verbs, must_be_usable
from carrel.client.verification import Verification


class _BlockingVerbs:
    """The verbs of a session, each as one that blocks."""

    run = blocking(Verbs["RemoteSession"].run)
    stream = blocking_stream(Verbs["RemoteSession"].stream)
    interrupt = blocking(Verbs["RemoteSession"].interrupt)
    execute_command = blocking(Verbs["RemoteSession"].execute_command)
    stream_command = blocking_stream(Verbs["RemoteSession"].stream_command)
    get_interaction = blocking(Verbs["RemoteSession"].get_interaction)
    read_file = blocking(Verbs["RemoteSession"].read_file)
    write_file = blocking(Verbs["RemoteSession"].write_file)
    download_file = blocking(Verbs["RemoteSession"].download_file)
    list_files = blocking(Verbs["RemoteSession"].list_files)
    str_replace = blocking(Verbs["RemoteSession"].str_replace)
    diff = blocking(Verbs["RemoteSession"].diff)
    changed_files = blocking(Verbs["RemoteSession"].changed_files)
    conversation = blocking(Verbs["RemoteSession"].conversation)
    add_messages = blocking(Verbs["RemoteSession"].add_messages)
    events = blocking_stream(Verbs["RemoteSession"].events)
    verify = blocking(Verbs["RemoteSession"].verify)
    fork = blocking(Verbs["RemoteSession"].fork)
    checkpoint = blocking(Verbs["RemoteSession"].checkpoint)
    checkpoints = blocking(Verbs["RemoteSession"].checkpoints)
    drop_checkpoint = blocking(Verbs["RemoteSession"].drop_checkpoint)
    rewind = blocking(Verbs["RemoteSession"].rewind)
    extend = blocking(Verbs["RemoteSession"].extend)
    refresh = blocking(Verbs["RemoteSession"].refresh)
    close = blocking(Verbs["RemoteSession"].close)


class RemoteSession(SessionRecord, _BlockingVerbs):
    """A session on a server; `with` ends it."""

    _sessions: Sessions[RemoteSession] = PrivateAttr()

    @classmethod
    def of(cls, sessions: Sessions[RemoteSession], data: Any, asked: Asked) -> RemoteSession:
        session = typed(cls, data, asked)
        session._sessions = sessions
        return session

    @property
    def _under(self) -> Verbs[RemoteSession]:
        return Unbound(self.session_id, self._sessions)

    def __enter__(self) -> Self:
        try:
            must_be_usable(self)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Blocking:
    """A group of calls that blocks, over the one that waits."""

    def __init__(self, under: Any) -> None:
        self._under = under


class BlockingHealth(_Blocking):
    """`client.health`."""

    check = blocking(HealthCheck.check)


class BlockingDatasets(_Blocking):
    """`client.datasets`."""

    list = blocking(DatasetOffers.list)


class BlockingSamples(_Blocking):
    """`client.samples`."""

    list = blocking(SampleOffers.list)
    each = blocking_stream(SampleOffers.each)
    download = blocking(SampleOffers.download)
    download_to = blocking(SampleOffers.download_to)


class BlockingVerification(_Blocking):
    """`client.sessions.verify`."""

    start = blocking(Verification.start)
    status = blocking(Verification.status)
    cancel = blocking(Verification.cancel)


class BlockingSessions(_Blocking):
    """`client.sessions`."""

    create = blocking(Sessions[RemoteSession].create)
    retrieve = blocking(Sessions[RemoteSession].retrieve)
    list = blocking(Sessions[RemoteSession].list)
    fork = blocking(Sessions[RemoteSession].fork)
    checkpoint = blocking(Sessions[RemoteSession].checkpoint)
    checkpoints = blocking(Sessions[RemoteSession].checkpoints)
    drop_checkpoint = blocking(Sessions[RemoteSession].drop_checkpoint)
    rewind = blocking(Sessions[RemoteSession].rewind)
    extend = blocking(Sessions[RemoteSession].extend)
    close = blocking(Sessions[RemoteSession].close)
    execute_command = blocking(Sessions[RemoteSession].execute_command)
    stream_command = blocking_stream(Sessions[RemoteSession].stream_command)
    get_interaction = blocking(Sessions[RemoteSession].get_interaction)
    run = blocking(Sessions[RemoteSession].run)
    stream = blocking_stream(Sessions[RemoteSession].stream)
    interrupt = blocking(Sessions[RemoteSession].interrupt)
    read_file = blocking(Sessions[RemoteSession].read_file)
    write_file = blocking(Sessions[RemoteSession].write_file)
    download_file = blocking(Sessions[RemoteSession].download_file)
    list_files = blocking(Sessions[RemoteSession].list_files)
    str_replace = blocking(Sessions[RemoteSession].str_replace)
    diff = blocking(Sessions[RemoteSession].diff)
    conversation = blocking(Sessions[RemoteSession].conversation)
    add_messages = blocking(Sessions[RemoteSession].add_messages)
    events = blocking_stream(Sessions[RemoteSession].events)

    def __init__(self, under: Sessions[RemoteSession]) -> None:
        super().__init__(under)
        self.verify = BlockingVerification(under.verify)


class Client:
    """Settings as AsyncClient has them. May be used by several threads at once, and inside a running event loop."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 300.0,
        max_retries: int = 4,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, Any] | None = None,
        http_client: httpx2.Client | None = None,
    ) -> None:
        url = address(base_url, http_client)
        self.base_url = str(url)
        key = os.environ.get("CARREL_API_KEY") if api_key is None else api_key
        http = http_client or httpx2.Client(**http_settings(url))
        headers = headers_for(key, default_headers)
        self._use(
            Wire(BlockingLine(http, url), timeout=timeout, retries=max_retries, headers=headers, query=default_query)
        )

    def _use(self, wire: Wire) -> None:
        self._wire = wire
        self.health = BlockingHealth(HealthCheck(wire))
        self.datasets = BlockingDatasets(DatasetOffers(wire))
        self.samples = BlockingSamples(SampleOffers(wire))
        self.sessions = BlockingSessions(Sessions(wire, RemoteSession.of))

    def with_options(self, **options: Unpack[Options]) -> Self:
        """The same client with other settings, on the same connections."""
        other = copy(self)
        other._use(self._wire.with_options(options))
        return other

    def __repr__(self) -> str:
        return f"Client(base_url={self.base_url!r})"

    def close(self) -> None:
        """Let go of the connections; sessions go on."""
        finished(self._wire.line.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
