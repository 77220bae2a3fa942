"""The files of /etc that a session sees: written for it, not the host's."""

from __future__ import annotations

import functools
import os

# Taken from the host, read-only: how to find libraries and fonts, and whom to trust.
BOUND = (
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/ssl/certs",
)
# Small ones are copied, which is quicker than a mount: what time it is here, and the names of ports and the like.
COPIED = (
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
)
# What a session with the network gets of these is written at its start.
OF_THE_NETWORK = ("/etc/hosts", "/etc/resolv.conf")
LARGEST = 256 * 1024


@functools.cache
def copies() -> dict[str, bytes]:
    """Read once, by the zygote."""
    found = {path: _host_bytes(path) for path in COPIED}
    return {path: content for path, content in found.items() if content}


def written(uid: int, home: str, hostname: str, network: bool) -> dict[str, str]:
    """Path to content."""
    files = {
        "/etc/passwd": (
            "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n"
            f"agent:x:{uid}:{uid}:agent:{home}:/bin/sh\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ),
        "/etc/group": f"root:x:0:\nagent:x:{uid}:\nnogroup:x:65534:\n",
        "/etc/hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost\n",
        "/etc/hostname": f"{hostname}\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
        "/etc/shells": "/bin/sh\n",
    }
    if network:
        files["/etc/resolv.conf"] = _host_text("/etc/resolv.conf")
        files["/etc/hosts"] += _own_hosts()
    return files


def _host_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(LARGEST)
    except OSError:
        return b""


def _host_text(path: str) -> str:
    return _host_bytes(path).decode("utf-8", errors="replace")


def _own_hosts() -> str:
    """Names that only the host's own file knows are part of the host's network."""
    lines = _host_text("/etc/hosts").splitlines()
    return "".join(f"{line}\n" for line in lines if line.split("#")[0].split()[1:] and "localhost" not in line)


def write_all(root: str, files: dict[str, str]) -> None:
    os.makedirs(root + "/etc/ssl", mode=0o755, exist_ok=True)
    written = {path: content.encode() for path, content in files.items()}
    for path, content in {**copies(), **written}.items():
        descriptor = os.open(root + path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(descriptor, content)
        os.close(descriptor)
