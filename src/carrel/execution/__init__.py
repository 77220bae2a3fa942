"""Running code: what an executor promises, and the kinds that keep it."""
