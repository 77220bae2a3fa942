"""Images of samples on a real engine: built once by content, pulled from a registry, reported beforehand."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import DatasetInvalid, EnvironmentFailed, SandboxUnavailable
from carrel.execution.docker_engine import connect
from carrel.tasks.dataset import Dataset
from carrel.tasks.dataset_check import check
from carrel.tasks.environment import open_executor, prepare_sample
from carrel.tasks.images import base_images, image_name, make_images, needed_images, pull_size, registry_of
from carrel.tasks.sample import Sample
from tests.support.real_docker import IMAGE
from tests.support.samples import CALC, PYTEST_ENV, calc, written

BUILT: dict[str, Any] = {"backend": "container", "workdir": "/app", "env": PYTEST_ENV}
DOCKERFILE = f"FROM {IMAGE} AS base\nFROM base\nWORKDIR /app\nCOPY code /app\nRUN echo built > /app/made.txt\n"


@pytest.fixture
def engine(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    return docker_engine


def built_sample(folder: Path, dockerfile: str = DOCKERFILE) -> Sample:
    """A sample whose files are in the image that its Dockerfile makes."""
    written(folder / "environment", {"Dockerfile": dockerfile, **{f"code/{name}": CALC[name] for name in CALC}})
    return calc(folder / "unused", files=None, environment={**BUILT, "dockerfile": folder / "environment/Dockerfile"})


@pytest.mark.real
async def test_an_image_is_built_once_for_each_content(tmp_path: Path, cache: Path, engine: str) -> None:
    mark = f"RUN echo {os.getpid()}\n"
    sample = built_sample(tmp_path, DOCKERFILE + mark).model_copy(update={"files": None})
    (needed,) = await needed_images([sample, sample], cache)
    assert (needed.is_present, needed.size, needed.samples) == (False, 0, ("calc-1", "calc-1"))
    steps: list[str] = []
    try:
        assert await make_images([needed], cache, on_step=lambda image, step: steps.append(step)) == {}
        assert "WORKDIR /app" in " ".join(steps), steps
        (now,) = await needed_images([sample], cache)
        assert now.is_present
        assert (now.size or 0) > 1_000_000
        executor = await open_executor(await prepare_sample(sample, cache))
        try:
            assert (await executor.exec("pwd; ls")).stdout.split() == ["/app", "calc.py", "made.txt", "tests"]
        finally:
            await executor.close()
        (finding,) = await check([sample], cache=cache)
        assert finding.status == "right", finding.faults
        again: list[str] = []
        assert await make_images([now], cache, on_step=lambda image, step: again.append(step)) == {}
        assert again == []
        (tmp_path / "environment/code/calc.py").write_text("def add(): pass\n")
        assert image_name(sample, cache) != needed.name
    finally:
        connect(engine)._api.remove_image(needed.name, force=True)


@pytest.mark.real
async def test_a_build_that_fails_says_where_and_leaves_nothing(tmp_path: Path, cache: Path, engine: str) -> None:
    mark = f"no-such-program-{os.getpid()}"
    sample = built_sample(tmp_path, f"FROM {IMAGE}\nRUN echo before; {mark}\n")
    failed = await make_images(await needed_images([sample], cache), cache)
    (problem,) = failed.values()
    assert "environment/Dockerfile" in problem
    assert mark in problem
    assert "before" in problem
    with pytest.raises(EnvironmentFailed, match=mark):
        await prepare_sample(sample, cache)
    # Other tests have containers on the same engine: only those of this build count.
    left = [each for each in connect(engine)._api.containers(all=True) if mark in str(each["Command"])]
    assert left == []
    (finding,) = await check([sample], cache=cache)
    assert (finding.status, "no-such-program" in finding.faults[0]) == ("wrong", True)


@pytest.mark.real
async def test_what_is_not_pulled_is_named(tmp_path: Path, cache: Path, engine: str) -> None:
    gone = "127.0.0.1:9/no/such:1"
    direct = calc(tmp_path / "calc", environment={"backend": "container", "image": gone})
    built = built_sample(tmp_path, f"FROM {gone}\nRUN true\n")
    needed = await needed_images([direct, built], cache)
    assert [(image.is_present, image.size, image.missing_bases) for image in needed] == [
        (False, None, ()),
        (False, None, (gone,)),
    ]
    with pytest.raises(SandboxUnavailable, match=f"not on the engine: {gone}\\. "):
        await make_images(needed, cache, pull="never")
    failed = await make_images(needed, cache)
    assert set(failed) == {image.name for image in needed}
    assert "could not be pulled" in failed[gone]


@pytest.mark.real
async def test_an_image_without_the_workdir(cache: Path, engine: str) -> None:
    environment = {"backend": "container", "image": IMAGE, "workdir": "/nowhere"}
    with pytest.raises(EnvironmentFailed, match=f"the image {IMAGE} has no folder /nowhere"):
        await prepare_sample(Sample(sample_id="a", environment=environment), cache)


class Registry(BaseHTTPRequestHandler):
    """A registry with one image, `kept/tiny:1`, whose manifest is given to those who have fetched a token."""

    def do_GET(self) -> None:
        server: Any = self.server
        if self.path.startswith("/token?") and "scope=repository%3Akept%2Ftiny%3Apull" in self.path:
            self.answer(json.dumps({"token": "seen"}).encode())
        elif self.headers.get("Authorization") != "Bearer seen":
            self.send_response(401)
            realm = f"http://127.0.0.1:{server.server_port}/token"
            self.send_header(
                "WWW-Authenticate", f'Bearer realm="{realm}",service="here",scope="repository:kept/tiny:pull"'
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path in server.content:
            self.answer(*server.content[self.path])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", digest(body))
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def registry() -> Iterator[str]:
    """The name of an image in a registry on this machine."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        entry = tarfile.TarInfo("data")
        entry.size = 50_000
        tar.addfile(entry, io.BytesIO(os.urandom(50_000)))
    layer = packed.getvalue()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [digest(gzip.decompress(layer))]},
        }
    ).encode()
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    vendor = "application/vnd.docker"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": f"{vendor}.container.image.v1+json",
                "size": len(config),
                "digest": digest(config),
            },
            "layers": [
                {
                    "mediaType": f"{vendor}.image.rootfs.diff.tar.gzip",
                    "size": len(layer),
                    "digest": digest(layer),
                }
            ],
        }
    ).encode()
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    index_kind = "application/vnd.oci.image.index.v1+json"
    platforms = [("s390x", "linux", "sha256:0"), ("amd64", "linux", digest(manifest)), ("arm64", "linux", "sha256:1")]
    manifests = [
        {"mediaType": kind, "size": len(manifest), "digest": of, "platform": {"architecture": machine, "os": system}}
        for machine, system, of in platforms
    ]
    index = json.dumps({"schemaVersion": 2, "mediaType": index_kind, "manifests": manifests}).encode()
    server.content = {
        "/v2/": (b"{}",),
        "/v2/kept/tiny/manifests/1": (index, index_kind),
        f"/v2/kept/tiny/manifests/{digest(index)}": (index, index_kind),
        f"/v2/kept/tiny/manifests/{digest(manifest)}": (manifest, kind),
        f"/v2/kept/tiny/blobs/{digest(config)}": (config, "application/octet-stream"),
        f"/v2/kept/tiny/blobs/{digest(layer)}": (layer, "application/octet-stream"),
    }
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}/kept/tiny:1"
    server.shutdown()
    server.server_close()
    thread.join(10)


async def test_a_registry_says_how_large_an_image_is(registry: str) -> None:
    size = await pull_size(registry)
    assert size is not None
    assert 50_000 < size < 60_000
    assert await pull_size(registry.replace("tiny:1", "other:1")) is None
    assert await pull_size(registry.replace("127.0.0.1", "127.0.0.2").partition("/")[0] + "/x y") is None


@pytest.mark.real
async def test_an_image_is_pulled_from_its_registry(registry: str, tmp_path: Path, cache: Path, engine: str) -> None:
    if not connect(engine).counts_files:
        pytest.skip("Podman pulls from a registry without TLS only where its settings allow that")
    sample = calc(tmp_path / "calc", environment={"backend": "container", "image": registry})
    (needed,) = await needed_images([sample], cache)
    assert not needed.is_present
    assert needed.size == await pull_size(registry)
    try:
        assert await make_images([needed], cache) == {}
        (now,) = await needed_images([sample], cache)
        assert now.is_present
    finally:
        if connect(engine).find_image(registry):
            connect(engine)._api.remove_image(registry)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("python:3.12-slim", ("registry-1.docker.io", "library/python", "3.12-slim")),
        ("swebench/sweb.eval:x", ("registry-1.docker.io", "swebench/sweb.eval", "x")),
        ("ghcr.io/a/b/c", ("ghcr.io", "a/b/c", "latest")),
        ("localhost:5000/a@sha256:12", ("localhost:5000", "a", "sha256:12")),
        ("localhost/a:1", ("localhost", "a", "1")),
    ],
)
def test_the_registry_of_a_name(name: str, parts: tuple[str, str, str]) -> None:
    assert registry_of(name) == parts


def test_the_images_that_a_dockerfile_starts_from(tmp_path: Path) -> None:
    text = "ARG v=1\nfrom --platform=linux/amd64 golang:1.22 as build\nFROM scratch\nFROM build\nFROM a:$v\nFROM b\n"
    (tmp_path / "Dockerfile").write_text(text)
    assert base_images(tmp_path / "Dockerfile") == ["golang:1.22", "b"]


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"backend": "container"}, "write backend and either image or dockerfile"),
        ({"dockerfile": "Dockerfile"}, "write backend and either image or dockerfile"),
        ({"backend": "container", "image": "a", "dockerfile": "b"}, "both set"),
        ({"backend": "container", "image": "a", "context": "b"}, "context is the folder of a dockerfile"),
        ({"runtime": "runsc"}, "runtime and writable are for containers"),
    ],
)
def test_settings_that_do_not_fit(environment: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Sample(sample_id="a", environment=environment)


def test_a_dockerfile_is_in_the_datasets_folder(tmp_path: Path) -> None:
    def load(dockerfile: str) -> Dataset:
        environment = {"backend": "container", "dockerfile": dockerfile}
        (tmp_path / "samples.jsonl").write_text(json.dumps({"sample_id": "a", "environment": environment}) + "\n")
        return Dataset.load(tmp_path)

    (sample,) = load("images/Dockerfile").samples
    assert sample.environment.dockerfile == tmp_path / "images/Dockerfile"
    with pytest.raises(DatasetInvalid, match=r"environment\.dockerfile: '\.\./Dockerfile' is not inside"):
        load("../Dockerfile")


@pytest.mark.real
async def test_a_dockerfile_that_is_not_there(tmp_path: Path, cache: Path, engine: str) -> None:
    environment = {"backend": "container", "dockerfile": tmp_path / "Dockerfile"}
    with pytest.raises(EnvironmentFailed, match="there is no Dockerfile"):
        await prepare_sample(Sample(sample_id="a", environment=environment), cache)
