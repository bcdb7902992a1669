"""Metrics, log lines and traces of the server."""
