"""The settings of a server, and the storage that its records are in."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

from carrel.execution.config import SandboxMode
from carrel.home import resolve_carrel_home
from carrel.session import RECORDED, FileStorage, Recorded, SharedStorage, open_shared_storage
from carrel.storage.leases import LEASE_SECONDS

PageMode = Literal["read", "act", "off"]
PAGE_MODES: tuple[PageMode, ...] = get_args(PageMode)
RecordMode = Literal["both", "variables", "files", "off"]
RECORD_MODES: dict[RecordMode, tuple[Recorded, ...]] = {
    "both": RECORDED,
    "variables": ("variables",),
    "files": ("files",),
    "off": (),
}
"""What is recorded of sessions, by the values of `carrel serve --record`."""
StoreLostMode = Literal["freeze", "end"]
STORE_LOST_MODES: tuple[StoreLostMode, ...] = get_args(StoreLostMode)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, where it keeps its records, and what its users may do."""

    host: str = "127.0.0.1"
    port: int = 8765
    """0 chooses a free one."""
    store: str | Path | None = None
    """Where keys, sessions and their logs are kept: a folder, `redis://…` or `postgresql://…`.

    None is `server` in carrel's folder."""
    keys: str | Path | None = None
    """Another store that has the keys, for servers that share them; None is `store`."""
    name: str = "main"
    """The name of this server in its store: at its start it ends the sessions that it had left live under this name."""
    join: bool = False
    """Whether it is a node of the cluster of its store, which several servers share then."""
    url: str | None = None
    """Where gateways and other nodes reach a node; None: at `host` and `port`."""
    lease: float = LEASE_SECONDS
    """Seconds after which a node that was not heard of is lost; it freezes after half of them."""
    on_store_lost: StoreLostMode = "freeze"
    """What a node does with its sessions when it could not renew its lease for half of it."""
    datasets: Path | None = None
    """A folder of datasets; None is carrel's own, and the demo."""
    demo: bool | None = None
    """Whether the demo dataset is served; None: only if no folder of datasets is given."""
    cache: Path | None = None
    """For unpacked files and set-up layers; None is carrel's own."""
    tools: Path | None = None
    """A folder of tool files that the code of sessions without a sample may call; None for no tools."""
    sandbox: SandboxMode | None = "required"
    network: bool = False
    """Whether a session without a sample may have the host's network."""
    max_sessions: int = 200
    """Live at one time, of all users together."""
    prewarmed: int = 4
    """Executors that are started in advance for samples that are requested repeatedly; 0 for none."""
    retention: timedelta | None = None
    """For how long the records of sessions that ended are kept; None is for ever."""
    verifications: int = max(2, os.cpu_count() or 2)
    """At one time."""
    requests_per_second: float = 500.0
    """Of one user, after the first `burst`."""
    burst: int = 2000
    wrong_keys_per_second: float = 5.0
    """Of one address."""
    record: Collection[Recorded] = RECORDED
    """What is recorded of sessions for the web page: variables after runs, and changed files."""
    page: PageMode | None = None
    """What the web page may do: `read`, `act` (also change things) or `off`; None is `act` on loopback, else `read`."""
    log_requests: bool = False
    """Whether a line is logged for each request."""
    max_body: int = 64 * 1024 * 1024
    """Bytes of one request."""

    @property
    def cache_dir(self) -> Path:
        return (self.cache or resolve_carrel_home() / "cache").expanduser().absolute()


def open_storage(store: str | Path | None) -> FileStorage | SharedStorage:
    """Return the storage of a server: a folder, or the server that a URL names."""
    if isinstance(store, str) and "://" in store:
        return open_shared_storage(store)
    folder = Path(store).expanduser().absolute() if store is not None else resolve_carrel_home() / "server"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return FileStorage(folder)
