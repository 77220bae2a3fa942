"""The kernel's part of a session: namespaces, mounts, limits, the system-call filter, and the zygote that forks it."""
