"""The images of samples in containers: which are missing and how large, pulled or built before they are needed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from carrel.errors import CarrelError, EnvironmentFailed, SandboxUnavailable
from carrel.execution.docker_engine import Engine, connect
from carrel.execution.environments import locked
from carrel.tasks.file_cache import Source, digest_of
from carrel.tasks.sample import Sample, SampleEnvironment

Pull = Literal["never", "missing", "always"]
OnImage = Callable[[str, str], None]
"""Gets the name of an image, and what is being done with it."""

_ADVICE = "`docker images` lists those that are there"
_BUILT = "carrel-build"
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE | re.MULTILINE)
_REGISTRY_TIME = 5.0
"""Seconds within which a registry must say how large an image is."""
_MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        *("oci.image.index.v1", "docker.distribution.manifest.list.v2"),
        *("oci.image.manifest.v1", "docker.distribution.manifest.v2"),
    )
)


@dataclass(frozen=True)
class NeededImage:
    """An image of some samples, and whether the engine has it."""

    name: str
    samples: tuple[str, ...]
    """The ids of the samples that run in it."""
    environment: SampleEnvironment
    is_present: bool
    size: int | None
    """Bytes on the engine; of a missing image, what is to be pulled, as its registry says; None if unknown."""
    missing_bases: tuple[str, ...] = ()
    """With a Dockerfile, the images in its FROM lines that the engine does not have."""

    @property
    def dockerfile(self) -> Path | None:
        return self.environment.dockerfile


async def needed_images(samples: Iterable[Sample], cache: Path) -> list[NeededImage]:
    """The images of these samples, each once; empty when none runs in a container."""
    users: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.environment.in_container:
            users.setdefault(await asyncio.to_thread(image_name, sample, cache), []).append(sample)
    if not users:
        return []
    engine = await asyncio.to_thread(connect)
    return list(await asyncio.gather(*(_needed(engine, name, found) for name, found in users.items())))


async def _needed(engine: Engine, name: str, samples: Sequence[Sample]) -> NeededImage:
    environment, ids = samples[0].environment, tuple(sample.sample_id for sample in samples)
    found = await asyncio.to_thread(engine.find_image, name)
    if found is not None:
        return NeededImage(name, ids, environment, True, int(found.get("Size") or 0))
    if environment.dockerfile is None:
        return NeededImage(name, ids, environment, False, await pull_size(name))
    bases = [base for base in base_images(environment.dockerfile) if engine.find_image(base) is None]
    sizes = await asyncio.gather(*map(pull_size, bases))
    size = None if None in sizes else sum(filter(None, sizes))
    return NeededImage(name, ids, environment, False, size, tuple(bases))


async def make_images(
    needed: Iterable[NeededImage], cache: Path, *, pull: Pull = "missing", on_step: OnImage = lambda image, step: None
) -> dict[str, str]:
    """Pull and build images, one after the other: those that are missing; with `always`, all.

    Returns the images for which that failed, each with the reason. With `never` nothing is pulled, and
    SandboxUnavailable names what would have to be."""
    needed = list(needed)
    if pull == "never":
        absent = [base for image in needed if not image.is_present for base in image.missing_bases or [image.name]]
        absent = [name for name in absent if not name.startswith(f"{_BUILT}:")]
        if absent:
            names = ", ".join(dict.fromkeys(absent))
            raise SandboxUnavailable(
                f"these images are not on the engine: {names}. Pull them there, or use --pull missing"
            )
    failed: dict[str, str] = {}
    for image in needed:
        if image.is_present and pull != "always":
            continue
        try:
            engine = await asyncio.to_thread(connect)
            if image.dockerfile is not None:
                await _build(engine, image.name, image.environment, cache, on_step, anew=pull == "always")
            else:
                await asyncio.to_thread(engine.pull, image.name, _ADVICE, partial(on_step, image.name))
        except CarrelError as problem:
            failed[image.name] = str(problem)
    return failed


async def ready_image(sample: Sample, cache: Path) -> str:
    """The name of the image of a sample, which the engine has: it is pulled or built if necessary."""
    name = await asyncio.to_thread(image_name, sample, cache)
    engine = await asyncio.to_thread(connect)
    if sample.environment.dockerfile is None:
        await asyncio.to_thread(engine.need_image, name, _ADVICE)
    elif await asyncio.to_thread(engine.find_image, name) is None:
        await _build(engine, name, sample.environment, cache, lambda image, step: None)
    return name


async def _build(
    engine: Engine, name: str, wanted: SampleEnvironment, cache: Path, on_step: OnImage, *, anew: bool = False
) -> None:
    dockerfile, context = _build_paths(wanted)
    (cache / "images").mkdir(parents=True, exist_ok=True, mode=0o700)
    # Two that need the same image build it once.
    async with locked(cache / "images" / f"{name.partition(':')[2]}.lock"):
        if anew or await asyncio.to_thread(engine.find_image, name) is None:
            if anew:
                for base in base_images(dockerfile):
                    await asyncio.to_thread(engine.pull, base, _ADVICE, partial(on_step, name))
            await asyncio.to_thread(
                engine.build_image,
                dockerfile,
                context,
                name,
                timeout=wanted.build_timeout,
                on_step=partial(on_step, name),
            )


def image_name(sample: Sample, cache: Path) -> str:
    """The image that a sample runs in; of a Dockerfile, a name by its content and that of its context."""
    wanted = sample.environment
    if wanted.dockerfile is None:
        return wanted.image
    dockerfile, context = _build_paths(wanted)
    facts = [digest_of(Source("folder", context), cache), os.path.relpath(dockerfile, context)]
    digest = hashlib.sha256("\0".join(facts).encode() + dockerfile.read_bytes()).hexdigest()[:32]
    return f"{_BUILT}:{digest}"


def _build_paths(wanted: SampleEnvironment) -> tuple[Path, Path]:
    """The Dockerfile and its context."""
    assert wanted.dockerfile is not None
    context = wanted.context or wanted.dockerfile.parent
    if not wanted.dockerfile.is_file():
        raise EnvironmentFailed(f"there is no Dockerfile {wanted.dockerfile}")
    if not context.is_dir():
        raise EnvironmentFailed(f"there is no folder {context}, the context of {wanted.dockerfile}")
    return wanted.dockerfile, context


def base_images(dockerfile: Path) -> list[str]:
    """The images that a Dockerfile starts from, without its own stages and names that depend on build arguments."""
    found: list[str] = []
    stages = {"scratch"}
    for name, stage in _FROM.findall(dockerfile.read_text(encoding="utf-8", errors="replace")):
        if name.lower() not in stages and "$" not in name:
            found.append(name)
        stages.add(stage.lower())
    return list(dict.fromkeys(found))


# --- how large an image is that the engine does not have ------------------------------------------------------------


async def pull_size(name: str) -> int | None:
    """The compressed size of an image's layers, as its registry says without a login; None if it says nothing."""
    import httpx2  # noqa: PLC0415 -- slow to load

    host, repository, reference = registry_of(name)
    is_local = re.fullmatch(r"(localhost|127\.\d+\.\d+\.\d+)(:\d+)?", host) is not None
    base = f"{'http' if is_local else 'https'}://{host}/v2/{repository}/manifests"
    try:
        async with httpx2.AsyncClient(timeout=_REGISTRY_TIME, headers={"Accept": _MANIFESTS}) as client:
            manifest = await _manifest(client, f"{base}/{reference}")
            if "manifests" in manifest:
                manifest = await _manifest(client, f"{base}/{_of_this_platform(manifest['manifests'])}")
            return sum(int(layer["size"]) for layer in manifest["layers"])
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError, StopIteration):
        return None


def registry_of(name: str) -> tuple[str, str, str]:
    """The registry's host, the repository there, and the tag or digest of an image."""
    path, at, digest = name.partition("@")
    first, slash, rest = path.partition("/")
    host = first if slash and (set(".:") & set(first) or first == "localhost") else ""
    repository, colon, tag = (rest if host else path).partition(":")
    if not host:
        repository = repository if "/" in repository else f"library/{repository}"
    return host or "registry-1.docker.io", repository, digest if at else tag if colon else "latest"


async def _manifest(client: Any, url: str) -> dict[str, Any]:
    """Fetch a manifest; with the token of an anonymous user, if the registry asks for one."""
    answer = await client.get(url)
    if answer.status_code == 401:
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', answer.headers.get("www-authenticate", "")))
        token = await client.get(wanted.pop("realm"), params=wanted)
        word = token.raise_for_status().json()
        answer = await client.get(url, headers={"Authorization": f"Bearer {word.get('token') or word['access_token']}"})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def _of_this_platform(manifests: list[dict[str, Any]]) -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return next(
        str(each["digest"])
        for each in manifests
        if (each.get("platform") or {}).get("architecture") == machine
        and (each.get("platform") or {}).get("os") == "linux"
    )
