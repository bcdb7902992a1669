"""Tool calls: how each model family writes them, read and constrained by one machine."""
