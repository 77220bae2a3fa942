"""A package index that cannot be reached: the error names the environment variables that help."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from carrel.errors import DependencyError
from carrel.execution.packages import subprocess_packages
from carrel.execution.settings import SubprocessConfig


async def failure_of_an_install(folder: Path) -> str:
    packages = await subprocess_packages(SubprocessConfig(base=folder))
    try:
        with pytest.raises(DependencyError) as failed:
            await packages.install(["a-package-that-nobody-has"])
    finally:
        await packages.give_back()
    return str(failed.value)


@pytest.fixture
def index_with_own_certificate(tmp_path: Path) -> Iterator[str]:
    """An index behind a certificate that no program knows, as behind a proxy that looks into what passes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "index")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "index.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
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
