"""The client of a carrel server: `Client` blocks, `AsyncClient` is awaited."""

from carrel.client._async.client import AsyncClient
from carrel.client._async.remote_session import AsyncRemoteSession
from carrel.client._sync.client import Client
from carrel.client._sync.remote_session import RemoteSession

__all__ = ["AsyncClient", "AsyncRemoteSession", "Client", "RemoteSession"]
