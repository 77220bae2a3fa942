"""The only room that names concrete kinds: a place in, everything that is kept and done there out."""

from carrel.assembly.sessions import Session, TaskSession
from carrel.assembly.storages import FileStorage, MemoryStorage, RedisStorage

__all__ = ["FileStorage", "MemoryStorage", "RedisStorage", "Session", "TaskSession"]
