"""The asynchronous client. `carrel.client._sync` is generated from this package by `make generate`."""
