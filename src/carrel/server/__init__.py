"""The fronts that other programs talk to."""
