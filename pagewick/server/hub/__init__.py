"""Several API processes on one port over one engine: the hub, which supervises them, and what they have in common.

The hub is the process that was started. `run` starts and ends the others, `member` keeps one API process running,
`peer` answers that process and `relay` passes its requests to the engine. `api_process` is the main module of an API
process.
"""
