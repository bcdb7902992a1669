"""Serving several models: each has an engine process of its own while it is loaded.

A request names its model, and waits until that is loaded. pool.py decides which models are loaded.
"""
