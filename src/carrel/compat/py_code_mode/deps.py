"""Packages of a session."""

from dataclasses import dataclass, field

from carrel import errors
from carrel.compat import INTERNAL, refuse_missing


class RuntimeDepsDisabledError(errors.RuntimeDepsDisabledError):
    """Packages may not be added or removed in this session."""


@dataclass
class SyncResult:
    installed: set[str] = field(default_factory=set)
    already_present: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


def checked_package(package: str) -> str:
    """Return a requirement; ValueError for one that is blank, too long, or no name with versions."""
    text = package.strip() if isinstance(package, str) else ""
    if not text or len(package) > 256 or not package.isprintable() or set(package) & set("@;()|&`$"):
        raise ValueError(f"{package!r:.80} is not a package: give a name with versions, as in pandas>=2")
    return package


_MISSING = (
    "DepsStore FileDepsStore MemoryDepsStore RedisDepsStore PackageInstaller DepsNamespace ControlledDepsNamespace"
)
__getattr__ = refuse_missing(__name__, dict.fromkeys(_MISSING.split(), INTERNAL))
