"""Limits of one process and those it starts, by setrlimit; cgroups.py has those of the session as a whole."""

from __future__ import annotations

import resource

from .plan import Plan


def apply(plan: Plan) -> None:
    """For the calling process and all that come from it; none can be raised again."""
    limits = plan.limits
    _lower(resource.RLIMIT_CORE, 0)
    if limits.processes is not None and plan.confined:
        # Counted per user namespace, so this session's only. Without one it would count all of the user's processes.
        # The first process of the place that waits for the next fork is counted too.
        _lower(resource.RLIMIT_NPROC, limits.processes + plan.can_fork)
    if limits.memory is not None and "memory" not in plan.held:
        # Private writable memory of each process. RLIMIT_AS would stop programs that map much and use little.
        _lower(resource.RLIMIT_DATA, limits.memory)
    if limits.disk is not None:
        _lower(resource.RLIMIT_FSIZE, limits.disk)
    _lower(resource.RLIMIT_MSGQUEUE, 1 << 20)
    _lower(resource.RLIMIT_MEMLOCK, 8 << 20)
    _lower(resource.RLIMIT_RTPRIO, 0)
    _lower(resource.RLIMIT_NICE, 0)


def apply_open_files(plan: Plan) -> None:
    """The last: it is also the number of descriptors that may be under way between all processes of a user before
    this one can send any, and what other sessions send counts too."""
    if plan.limits.open_files is not None:
        _lower(resource.RLIMIT_NOFILE, plan.limits.open_files)


def _lower(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))
