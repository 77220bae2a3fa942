"""What a server has to offer: its health, its datasets, their samples."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Unpack

from carrel.client.answers import DatasetInfo, Health, SampleInfo, SampleList
from carrel.client.asking import Asking, Extra, part, typed
from carrel.errors import ServerFailed

PAGE = 100


class HealthCheck(Asking):
    """`client.health`."""

    async def check(self, **more: Unpack[Extra]) -> Health:
        """Needs no key."""
        return await self._typed(Health, self._asked("GET", "/health", "ask how the server is", more))


class DatasetOffers(Asking):
    """`client.datasets`."""

    async def list(self, **more: Unpack[Extra]) -> list[DatasetInfo]:
        asked = self._asked("GET", "/datasets", "list datasets", more)
        found = await self._data(asked)
        if not isinstance(found, list):
            raise ServerFailed(f"{asked.words}: the answer is no list")
        return [typed(DatasetInfo, each, asked) for each in found]


class SampleOffers(Asking):
    """`client.samples`."""

    async def list(
        self,
        *,
        dataset: str | None = None,
        page: int | None = None,
        page_size: int | None = None,
        search: str | None = None,
        **more: Unpack[Extra],
    ) -> SampleList:
        """A page of samples, or all of them when no page is named."""
        query = {"dataset": dataset, "page": page, "page_size": page_size, "search": search}
        return await self._typed(SampleList, self._asked("GET", "/samples", "list samples", more, query=query))

    async def each(
        self, *, dataset: str | None = None, search: str | None = None, **more: Unpack[Extra]
    ) -> AsyncGenerator[SampleInfo, None]:
        """All samples, fetched page by page as they are asked for."""
        number, has_more = 1, True
        while has_more:
            page = await self.list(dataset=dataset, search=search, page=number, page_size=PAGE, **more)
            for sample in page.samples:
                yield sample
            number, has_more = number + 1, page.has_more and bool(page.samples)

    async def download(
        self, sample_id: str, *, dataset: str, version: int | None = None, **more: Unpack[Extra]
    ) -> bytes:
        """A sample's files as a .tar.gz."""
        path = f"/samples/{part('dataset', dataset)}/{part('sample_id', sample_id)}/download"
        asked = self._asked("GET", path, f"download {dataset}/{sample_id}", more, query={"version": version})
        return (await self._wire.ask(asked)).content

    async def download_to(
        self,
        to: str | Path,
        sample_id: str,
        *,
        dataset: str,
        version: int | None = None,
        on_progress: Callable[[int, int | None], object] | None = None,
        **more: Unpack[Extra],
    ) -> Path:
        """The same into a file here, which is there whole or not at all."""
        path = f"/samples/{part('dataset', dataset)}/{part('sample_id', sample_id)}/download"
        asked = self._asked("GET", path, f"download {dataset}/{sample_id}", more, query={"version": version})
        return await self._download(asked, Path(to), on_progress)
