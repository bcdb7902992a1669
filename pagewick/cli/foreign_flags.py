"""Flags and words on command lines of vLLM, llama.cpp, candle-vllm and vllm.rs that have no field here.

Most are flags, which are accepted with a note or refused; pagewick/foreign_names.py has those of every command that
runs an engine, and explains the tables. DIALECT_NAMES and MODEL_TYPES tell a command line of candle-vllm or vllm.rs,
whose users expect other defaults.
"""

from __future__ import annotations

from typing import Any

import click

from pagewick.foreign_names import NOTED, REFUSED, ForeignName, Lines, names_of
from pagewick.server.settings import ANY_NAME

# Names of `model` that only candle-vllm and vllm.rs have. Their servers take any model name in requests.
DIALECT_NAMES = {"m", "w", "model_id", "weight_path"}
DIALECT_SETTINGS: dict[str, Any] = {"served_model_name": (ANY_NAME,)}
# candle-vllm's words for an architecture, which follow the model on its command lines. Its port is 2000.
MODEL_TYPES = {
    *("llama", "llama3", "llama7b", "llama13b", "llama70b", "mistral", "phi2", "phi3", "qwen2", "qwen3"),
    *("gemma", "gemma3", "yi", "stable-lm", "deep-seek", "glm4"),
}
MODEL_TYPE_SETTINGS: dict[str, Any] = {**DIALECT_SETTINGS, "port": 2000}

# Flags of `serve` only.
SERVER_NOTED: Lines = (
    ("--server --server-mode --jinja", "that is what pagewick serve does"),
    ("--response-role=assistant", "the role is always assistant"),
    (
        "--disable-uvicorn-access-log --disable-access-log",
        "each request is logged in one line; --no-log-requests turns this off",
    ),
    ("--enable-auto-tool-choice", "tools are always accepted"),
    ("--enable-prompt-tokens-details", "usage always has them"),
    ("--disable-frontend-multiprocessing", "HTTP has a process of its own, the engine another"),
)
SERVER_REFUSED: Lines = (
    ("--generation-config=auto --override-generation-config=", "the default for requests is the model's, from "
     "generation_config.json in its directory; --temperature, --top-p, --max-tokens and the like change it"),
    ("--tool-parser-plugin=", "nothing is loaded into the server; --tool-call-parser names a known format"),
    ("--tool-prompt=", "the chat template describes the tools; give another one with --chat-template"),
    ("--mcp-command= --mcp-args= --mcp-config= --tool-server=", "the client runs the tools that it offers"),
    ("--ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-key-file= --ssl-cert-file=", "let a proxy such as nginx or "
     "Caddy speak TLS, and listen on 127.0.0.1"),
    ("--uds=", "a Unix socket is not supported yet; give --host and --port"),
    ("--root-path= --api-prefix= --path=", "let a proxy change paths"),
    ("--timeout= -to=", "use --request-timeout, --write-timeout or --keep-alive-timeout"),
    ("--middleware=", "nothing is loaded into the server; put a proxy before it"),
    ("--slots --props --models-dir= --models-max=", "not supported yet; one server serves one model"),
    ("--i --interactive -i -cnv --conversation", "pagewick chat talks in the terminal"),
    ("--prompts= --prompt= --batch=", "pagewick complete answers prompts, and pagewick bench measures"),
    ("--log-config-file= --max-log-len= --log-file=", "the log goes to stderr; --log-format, --log-level and "
     "--log-prompts control it"),
    ("--allowed-methods= --allowed-headers= --allow-credentials", "--allowed-origins is all that is needed"),
)  # fmt: skip

# Flags of `chat` and `complete`.
TERMINAL_NOTED: Lines = (
    ("--i --interactive -i -cnv --conversation", "pagewick chat is a conversation"),
    ("--live", "responses are shown as Markdown while they arrive; --plain turns this off"),
)
TERMINAL_REFUSED: Lines = (
    ("--server", "pagewick serve is the server"),
    ("--system-prompt= -sys=", "pagewick chat takes --system"),
)


class ForeignOption(click.Option):
    """A hidden flag of another program, which is accepted with a note or refused."""

    def __init__(self, foreign: ForeignName) -> None:
        self.foreign = foreign
        self.flag, self.sentence, self.harmless = foreign.flag, foreign.sentence, foreign.harmless
        attributes: dict[str, dict[str, Any]] = {
            "none": {"is_flag": True},
            "optional": {"type": str, "is_flag": False, "flag_value": "on"},
            "one": {"type": str},
        }
        name = f"foreign{self.flag.replace('-', '_')}"
        super().__init__(
            [self.flag, name],
            default=None,
            hidden=True,
            expose_value=False,
            callback=self._tell,
            **attributes[foreign.takes],
        )

    def _tell(self, ctx: click.Context, param: click.Parameter, value: Any) -> None:
        verdict = self.foreign.verdict(value) if value and not ctx.resilient_parsing else ""
        if verdict == "refused":
            raise click.UsageError(f"{self.flag}: {self.sentence}.", ctx)
        if verdict:
            click.echo(f"note: {self.flag} changes nothing: {self.sentence}", err=True)


def foreign_options(*, is_server: bool, is_terminal: bool) -> list[ForeignOption]:
    """Return other programs' flags for a command: `serve`, `chat` or `complete` (is_terminal), or another one."""
    noted = NOTED + (SERVER_NOTED if is_server else ()) + (TERMINAL_NOTED if is_terminal else ())
    refused = REFUSED + (SERVER_REFUSED if is_server else ()) + (TERMINAL_REFUSED if is_terminal else ())
    return [ForeignOption(foreign) for foreign in names_of(noted, refused)]
