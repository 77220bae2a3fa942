"""What this machine can do for containers: whether an engine answers, and whether it has another kernel to offer."""

from __future__ import annotations

from carrel.errors import SandboxUnavailable
from carrel.execution.engine import connect
from carrel.guest.sandbox.probe import Part

_ENGINE = "containers, of the engine {} (ContainerExecutor)"
_KERNEL = "another kernel between the code and this one (gVisor: runtime='runsc')"
_GET_ENGINE = "pip install 'carrel[container]', and start Docker or Podman; DOCKER_HOST names another than Docker's own"
_GET_KERNEL = "install runsc and name it in the engine's settings: `runsc install`, then start the engine again"


def engine_parts(address: str | None = None) -> tuple[Part, ...]:
    """Two rows of `carrel doctor`; asks the engine."""
    try:
        engine = connect(address)
    except SandboxUnavailable as problem:
        why = str(problem).partition(". ")[0]
        return (
            Part("engine", _ENGINE.format("that answers"), False, why, _GET_ENGINE),
            Part("runsc", _KERNEL, False, "no container engine answers", _GET_KERNEL),
        )
    has = engine.has_runtime("runsc")
    why = "" if has else f"the engine has the runtimes {', '.join(sorted(engine.info().get('Runtimes') or ['?']))}"
    return (
        Part("engine", _ENGINE.format(f"at {engine.where}, version {engine.version()}"), True, "", ""),
        Part("runsc", _KERNEL, has, why, "" if has else _GET_KERNEL),
    )
