"""Requests for text, independent of the dialect in which they come."""
