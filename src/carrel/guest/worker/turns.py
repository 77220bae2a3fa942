from .host_calls import MAX_BYTES as MOST_BYTES
from .host_calls import MAX_CALLS as MOST

__all__ = ["MOST", "MOST_BYTES"]
