"""`python -m pagewick.vllm_rs`: vllm.rs's command, whose flags say which of our commands it is."""

from __future__ import annotations

import sys

# The flags that select a command, the first of them that is given. Nothing else asks for one.
_COMMANDS = {"--server": "serve", "--i": "chat", "--batch": "bench", "--prompts": "complete"}
# vllm.rs has no option for the data type of weights; its --dtype is that of the KV cache.
_DTYPE_NOTE = (
    "note: --dtype is the data type of weights and activations here; for that of the KV cache, as in vllm.rs, write "
    "--kv-cache-dtype"
)


def main(command: str | None = None) -> None:
    """Run `pagewick serve`, `chat` or `complete` with the command line's flags.

    In vllm.rs, prompts are messages for a chat model, and --batch is a benchmark, which needs no prompts.
    """
    from pagewick.cli import cli

    given = sys.argv[1:]
    flags = {arg.partition("=")[0] for arg in given}
    if command is None:
        command = next((name for flag, name in _COMMANDS.items() if flag in flags), None)
        if command is None and not flags & {"--help", "-h"}:
            sys.exit(f"error: give one of {', '.join(_COMMANDS)}")
    if "--dtype" in flags:
        print(_DTYPE_NOTE, file=sys.stderr)
    if command == "complete" and "--batch" not in flags:
        given = ["--chat", *given]
    cli([command, *given] if command else ["--help"], prog_name="pagewick")


if __name__ == "__main__":
    main()
