"""Limits on clients: access, sizes, and time."""
