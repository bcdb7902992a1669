"""Anthropic's Messages API: its routes, fields, content blocks, responses and events."""
