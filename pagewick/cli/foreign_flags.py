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
    ("--disable-access-log-for-endpoints=", "only requests for text and refused ones are logged"),
    ("--enable-log-deltas --no-enable-log-deltas", "--log-prompts logs a text when it is complete"),
    ("--log-error-stack", "an unexpected error is always logged with its traceback"),
    ("--enable-server-load-tracking", "/metrics always has the numbers of running and waiting requests"),
    ("--enable-request-id-headers", "every response has an x-request-id"),
    ("--enable-offline-docs", "/docs loads nothing from other servers"),
    ("--exclude-tools-when-tool-choice-none", "tools are always left out of the prompt then"),
    ("--threads-http=", "one process handles HTTP, or several with --api-server-count"),
    ("--log-colors=?", "the log has no colours"),
    ("--kv-unified -kvu", "all sequences always share one KV cache"),
    ("--slot-prompt-similarity= -sps=", "every request finds every cached prefix"),
    ("--slots", "GET /slots is always there"),
    ("--no-slots", "GET /slots tells only how many sequences are running, as /metrics does"),
)
SERVER_REFUSED: Lines = (
    ("--generation-config=auto --override-generation-config=", "the default for requests is the model's, from "
     "generation_config.json in its directory; --temperature, --top-p, --max-tokens and the like change it"),
    ("--tool-parser-plugin=", "nothing is loaded into the server; --tool-call-parser names a known format"),
    ("--tool-prompt=", "the chat template describes the tools; give another one with --chat-template"),
    ("--tool-server=", "--mcp-config names MCP servers, whose tools the server runs itself"),
    ("--ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-cert-reqs= --ssl-ciphers= --enable-ssl-refresh "
     "--ssl-key-file= --ssl-cert-file=", "let a proxy such as nginx or Caddy speak TLS, and listen on 127.0.0.1"),
    ("--chat-template-content-format=auto", "the template determines the form of messages"),
    ("--default-chat-template-kwargs= --chat-template-kwargs=", "each request gives chat_template_kwargs; --thinking "
     "and --thinking-budget set whether and how long the model thinks if it does not say"),
    ("--enable-force-include-usage", "the last chunk of a stream has the usage if its request has stream_options: "
     "{include_usage: true}; all other responses always have it"),
    ("--return-tokens-as-token-ids", "a request with return_token_ids gets the ids beside the tokens"),
    ("--enable-per-request-metrics", "a request with timings_per_token gets its times"),
    ("--enable-tokenizer-info-endpoint", "/tokenize, /detokenize and /apply-template show what the tokenizer does"),
    ("--enable-log-outputs", "--log-prompts logs the text of prompts and responses"),
    ("--uvicorn-log-level= --log-verbosity= -lv=", "--log-level sets the least severe messages to log"),
    ("--log-disable", "--log-level error --no-log-requests logs errors only"),
    ("--h11-max-header-count=100", "a request may have 100 headers"),
    ("--fingerprint-mode=full|hash --fingerprint-value=", "system_fingerprint tells when the same seed may give "
     "another response"),
    ("--grpc", "only HTTP is served"),
    ("--samplers= --sampling-seq=", "sampling has one order, which docs/sampling.md describes"),
    ("--prio= --poll= --cpu-mask= -C=", "not supported yet; nice and taskset do it from outside"),
    ("--root-path= --api-prefix= --path=", "let a proxy change paths"),
    ("--timeout= -to=", "use --request-timeout, --write-timeout or --keep-alive-timeout"),
    ("--middleware=", "nothing is loaded into the server; put a proxy before it"),
    ("--props", "settings cannot be changed while the server runs; GET /props shows them"),
    ("--i --interactive -i -cnv --conversation", "pagewick chat talks in the terminal"),
    ("--prompts= --prompt= --batch=", "pagewick complete answers prompts, and pagewick bench measures"),
    ("--log-config-file= --max-log-len= --log-file=", "the log goes to stderr; --log-format, --log-level and "
     "--log-prompts control it"),
    ("--allowed-methods= --allowed-headers= --allow-credentials", "--allowed-origins is all that is needed"),
)  # fmt: skip

# Flags of `chat` and `complete`.
TERMINAL_NOTED: Lines = (
    ("--i --interactive -i -cnv --conversation", "pagewick chat is a conversation"),
    ("--stream-interval=", "each step's tokens are shown at once"),
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
