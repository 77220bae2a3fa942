"""A package index that cannot be reached: the error names the environment variables that help."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from carrel.errors import DependencyError
from carrel.execution.config import SubprocessConfig
from carrel.execution.packages import subprocess_packages

CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgIaWALdQAkr/ttDxA
UYt5RZ7aUlFX48rQsZglTKr7Na6hRANCAATuRJ+E6MOM7mcbNF2dtYGy9qdd2YZ5
Q1j9QBh472W7qDzHHM7sI52qc9yP9oX8Wjtda0i9v10Qv9JYQdYmF2AV
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBiDCCAS6gAwIBAgIUTO9mWbRL9S+ecNnoW/J50/IEVbAwCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFaW5kZXgwIBcNMjYxMTE4MjI1ODMyWhgPMjEyNjEwMjUyMjU4
MzJaMBAxDjAMBgNVBAMMBWluZGV4MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
7kSfhOjDjO5nGzRdnbWBsvanXdmGeUNY/UAYeO9lu6g8xxzO7COdqnPcj/aF/Fo7
XWtIvb9dEL/SWEHWJhdgFaNkMGIwHQYDVR0OBBYEFDNEGcQxTOlkY9Gz8AEszPqN
6vnYMB8GA1UdIwQYMBaAFDNEGcQxTOlkY9Gz8AEszPqN6vnYMA8GA1UdEwEB/wQF
MAMBAf8wDwYDVR0RBAgwBocEfwAAATAKBggqhkjOPQQDAgNIADBFAiEAtbQwj7ID
jcWSgvLE3c+H5cncDI44BE6p9CU8Cni8mbMCIGj1nXBTdgRvNOczabWfEzpIvnmm
8DMV3BK3DS+l1azB
-----END CERTIFICATE-----
"""
"""Of 127.0.0.1, self-signed, with its key: of no use to any other program."""


async def failure_of_an_install(folder: Path) -> str:
    packages = await subprocess_packages(SubprocessConfig(base=folder))
    try:
        with pytest.raises(DependencyError) as failed:
            await packages.install(["a-package-that-does-not-exist"])
    finally:
        await packages.give_back()
    return str(failed.value)


@pytest.fixture
def index_with_own_certificate(tmp_path: Path) -> Iterator[str]:
    """An index behind a certificate that no program knows, as behind a proxy that looks into what passes."""
    file = tmp_path / "index.pem"
    file.write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"https://127.0.0.1:{server.server_address[1]}/simple"
    server.shutdown()
    serving.join()
    server.server_close()


async def test_an_unknown_certificate_names_ssl_cert_file(
    index_with_own_certificate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_INDEX_URL", index_with_own_certificate)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    text = await failure_of_an_install(tmp_path / "base")
    assert "invalid peer certificate" in text
    assert "set SSL_CERT_FILE" in text
    assert 'under "env"' in text


@pytest.mark.parametrize(
    ("name", "value"), [("HTTPS_PROXY", "http://127.0.0.1:9"), ("UV_INDEX_URL", "https://127.0.0.1:9/simple")]
)
async def test_an_index_that_is_out_of_reach_names_the_proxy_and_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    text = await failure_of_an_install(tmp_path / "base")
    assert "set HTTPS_PROXY" in text
    assert "UV_INDEX_URL" in text
    assert 'under "env"' in text


async def test_a_package_that_does_not_exist_says_nothing_of_the_network(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    packages = await subprocess_packages(SubprocessConfig(base=tmp_path / "base", wheelhouse=tmp_path / "wheels"))
    with pytest.raises(DependencyError) as failed:
        await packages.install(["certificate-proxy"])
    await packages.give_back()
    assert "env" not in str(failed.value)
