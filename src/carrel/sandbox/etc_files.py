"""The files of /etc that a session sees: written for it, not the host's."""

from __future__ import annotations

import os

# Taken from the host, read-only: how to find libraries, trust servers, tell the time and name ports.
FROM_HOST = (
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/ca-certificates.conf",
    "/etc/debian_version",
    "/etc/fonts",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
)


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
    release = _host_text("/etc/os-release")
    if release:
        files["/etc/os-release"] = release
    return files


def _host_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(64 * 1024)
    except OSError:
        return ""


def _own_hosts() -> str:
    """Names that only the host's own file knows are part of the host's network."""
    lines = _host_text("/etc/hosts").splitlines()
    return "".join(f"{line}\n" for line in lines if line.split("#")[0].split()[1:] and "localhost" not in line)


def write_all(root: str, files: dict[str, str]) -> None:
    os.makedirs(root + "/etc", mode=0o755, exist_ok=True)
    for path, content in files.items():
        with open(root + path, "w", encoding="utf-8") as file:
            file.write(content)
