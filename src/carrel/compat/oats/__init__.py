"""The names of oats-coder 1.0.19: `from carrel.compat.oats.session.session import create_session`."""
