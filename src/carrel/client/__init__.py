"""The sessions of a server, from outside: `Client` blocks, `AsyncClient` waits."""

from carrel.client.async_client import AsyncClient
from carrel.client.client import Client, RemoteSession
from carrel.client.verbs import AsyncRemoteSession

__all__ = ["AsyncClient", "AsyncRemoteSession", "Client", "RemoteSession"]
