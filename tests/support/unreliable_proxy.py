"""A proxy to a server whose connections break when a test wants it."""

import asyncio


class UnreliableProxy:
    """Passes everything on and, when `breaks` is set, breaks right before the next answer comes through."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.breaks = False
        self._cables: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "UnreliableProxy":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for cable in self._cables:
            cable.cancel()
        await asyncio.gather(*self._cables, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._port)
        self._cables |= {
            asyncio.create_task(self._pass_on(reader, requests, may_break=False)),
            asyncio.create_task(self._pass_on(answers, writer, may_break=True)),
        }

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, may_break: bool) -> None:
        try:
            while data := await source.read(65536):
                if may_break and self.breaks:
                    self.breaks = False
                    break
                target.write(data)
                await target.drain()
        finally:
            target.close()
