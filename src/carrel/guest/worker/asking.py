from .host_calls import encode_arguments as encoded

__all__ = ["encoded"]
