"""Attention over a paged KV cache: its blocks (cache_spec), and backends that fill and read them (backend, native)."""
