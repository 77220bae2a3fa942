"""Events, ids and stored objects."""

from carrel.compat import refuse_missing
from carrel.compat.oats.core.bus import EventBus, bus
from carrel.compat.oats.core.id import generate_id
from carrel.compat.oats.core.storage import Storage

__all__ = ["EventBus", "Storage", "bus", "generate_id"]

__getattr__ = refuse_missing(
    __name__, dict.fromkeys(("Config", "get_config"), "carrel calls no provider, so it has no configuration of one")
)
