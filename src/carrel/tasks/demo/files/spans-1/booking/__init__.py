"""Rooms and when they are taken."""
