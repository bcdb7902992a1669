"""Attention over a paged KV cache: what a layer keeps there (cache_spec) and who computes it (backend)."""
