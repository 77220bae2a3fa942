"""Bytes under path-like keys: objects that are replaced whole, logs that only grow."""
