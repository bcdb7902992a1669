"""ServerSettings: all settings of the server; EngineConfig has those of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError
from pagewick.option_checks import check_choice, flag_of, parse_bytes
from pagewick.other_names import in_bytes, opposite, unless_negative

LOG_FORMATS = ("text", "json")
PREFIX_CACHE_SCOPES = ("global", "key")
SIZES = ("max_body_size", "max_header_size")
# Default limits of a body in bytes. A photo of a phone has 3 to 5 MiB, and a third more in base64.
TEXT_BODY_SIZE, IMAGE_BODY_SIZE = 10 * 2**20, 32 * 2**20
# Far more than one engine can use.
MAX_API_SERVERS = 64
_LOOPBACK = "127.0.0.1"
# As a served_model_name: requests may name any model.
ANY_NAME = "*"


def _option(default: Any, description: str, *, is_secret: bool = False) -> Any:
    return field(default=default, repr=not is_secret, metadata={"help": description})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Names are vLLM's where it has one. Sizes are in bytes, times in seconds. Raises ConfigError for a wrong value."""

    host: str = _option(_LOOPBACK, "Address to listen on; any but loopback needs an API key or --insecure.")
    port: int = _option(8000, "Port to listen on; 0 takes any free one.")
    uds: str | None = _option(None, "Path of a Unix socket to listen on, instead of a host and a port.")
    api_server_count: int = _option(1, "Processes that answer requests, on one port and over one engine.")
    served_model_name: tuple[str, ...] = _option(
        (), "Model name for clients; may be repeated; * is any (default: MODEL)."
    )
    chat_template: str | None = _option(None, "File with a Jinja chat template, instead of the model's.")
    trust_request_chat_template: bool = _option(False, "Let requests bring their own chat template.")
    reasoning_parser: str = _option("auto", "Separate reasoning from the content: auto (by the model's tags) or none.")
    tool_call_parser: str | None = _option(None, "Format of the model's tool calls (default: by its chat template).")
    thinking: bool | None = _option(None, "Whether the model thinks before it answers, for requests that do not say.")
    thinking_budget: int | None = _option(None, "Largest number of reasoning tokens, for requests that set none.")
    allow_runtime_lora_updating: bool = _option(
        False, "Let clients load LoRA adapters from paths that they name, and unload them (implies --enable-lora)."
    )
    record_conversation: bool = _option(False, "Keep the messages of each session, so that clients send only new ones.")

    mcp_command: str | None = _option(None, "Program of an MCP server whose tools this server runs (pagewick[mcp]).")
    mcp_args: str | None = _option(None, "Arguments of --mcp-command, separated by commas.")
    mcp_config: str | None = _option(None, "JSON file with MCP servers whose tools this server runs, in mcpServers.")
    mcp_timeout: float = _option(60.0, "Seconds that a call of an MCP tool may take.")
    mcp_max_rounds: int = _option(8, "Largest number of rounds of MCP tool calls in one request.")
    mcp_max_result: int = _option(32768, "Characters of an MCP tool's result after which it is cut.")

    api_key: tuple[str, ...] = _option(
        (), "API key that clients must send; may be repeated (--api-key-file is safer).", is_secret=True
    )
    api_key_file: str | None = _option(None, "File with an API key, or name:key, on each line.")
    insecure: bool = _option(False, "Allow listening on other addresses than loopback without an API key.")
    allowed_hosts: tuple[str, ...] = _option((), "Accept this Host name, too; may be repeated; * accepts any.")
    allowed_origins: tuple[str, ...] = _option((), "Let web pages of this origin use the API; may be repeated.")
    prefix_cache_scope: str = _option(
        "global", "Who shares cached prefixes: global (all) or key (users of one API key)."
    )

    max_body_size: int | None = _option(
        None, "Largest request body, also after decompression (default: 10M; 32M if the model reads images)."
    )
    max_header_size: int = _option(64 * 2**10, "Largest size of a request's headers, of which there may be 100.")
    max_connections: int = _option(4096, "Largest number of connections at the same time.")
    header_timeout: float = _option(10.0, "Seconds for a request's headers to arrive.")
    body_timeout: float = _option(30.0, "Seconds to wait for the next byte of a request body.")
    write_timeout: float = _option(60.0, "Seconds after which a client that reads nothing is disconnected.")
    keep_alive_timeout: float = _option(75.0, "Seconds to keep an idle connection.")
    sse_keep_alive_interval: float = _option(10.0, "Seconds without an event after which a stream gets a comment.")
    stream_interval: int = _option(1, "Tokens that an event of a stream waits for; its first one does not wait.")
    shutdown_timeout: float = _option(5.0, "Seconds that running requests get after the first signal.")
    hang_timeout: float = _option(
        60.0,
        "Seconds without progress after which the engine or an API process is restarted; 0: never.",
    )
    strict: bool = _option(False, "Refuse requests with unknown fields instead of naming these in a header.")

    prefill_url: str | None = _option(
        None, "Server that computes long prompts for this one: http://host:port/v1, or unix:PATH."
    )
    prefill_min_tokens: int = _option(256, "Length in tokens of the shortest prompt that --prefill-url computes.")
    prefill_api_key: str | None = _option(None, "API key of --prefill-url.", is_secret=True)

    log_format: str = _option("text", "Format of the log: text or json (one object per line).")
    log_requests: bool = _option(True, "Log a line for every finished request, without its text.")
    log_prompts: bool = _option(False, "Also log the text of prompts and responses.")
    otlp_endpoint: str | None = _option(
        None, "Send a trace of every request to this URL (OTLP over HTTP; needs pagewick[otel])."
    )
    ui: bool = _option(True, "Serve the chat page at /.")
    docs: bool = _option(True, "Serve the description of the API at /docs and /openapi.json.")

    models_dir: str | None = _option(None, "Directory whose models are served; a request loads the one it names.")
    models_preset: str | None = _option(None, "TOML file with a table of flags for each model to serve.")
    models_max: int = _option(4, "Largest number of models that are loaded at the same time.")
    models_autoload: bool = _option(True, "Let requests load the model that they name, not only POST /models/load.")
    sleep_idle_seconds: float | None = _option(None, "Seconds without a request after which a model is unloaded.")

    def __post_init__(self) -> None:
        for name in SIZES:
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, parse_bytes(getattr(self, name)))
        self._read_host()
        check_choice("log_format", self.log_format, LOG_FORMATS)
        check_choice("prefix_cache_scope", self.prefix_cache_scope, PREFIX_CACHE_SCOPES)
        if self.reasoning_parser not in ("auto", "none"):
            raise ConfigError(
                f"--reasoning-parser must be auto or none; got {self.reasoning_parser!r}: auto learns from the "
                "model how thoughts are written"
            )
        if not all(self.served_model_name):
            raise ConfigError(
                "--served-model-name must not be empty; leave it out to serve the model under its own name"
            )
        for name in self.served_model_name:
            if (shown := name.encode(errors="replace").decode()) != name:
                raise ConfigError(
                    f"the name {shown} is not UTF-8, as names in requests are; give a --served-model-name"
                )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be 0 to 65535; got {self.port}")
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(
                f"--api-server-count must be 1 to {MAX_API_SERVERS}; got {self.api_server_count}: more than one for "
                "each core is never faster"
            )
        if not self.has_several_models:
            self._refuse_pool_options()
        if self.has_several_models and self.api_server_count > 1:
            raise ConfigError("--api-server-count must be 1 with several models; leave it out")
        if self.has_several_models and self.allow_runtime_lora_updating:
            raise ConfigError(
                "--allow-runtime-lora-updating is for a server with one model; with several, lora-modules in a table "
                "of --models-preset gives a model its adapters"
            )
        if self.allow_runtime_lora_updating and self.api_server_count > 1:
            raise ConfigError("--allow-runtime-lora-updating needs --api-server-count 1")
        for option in fields(self):
            self._check_number(option.name)
        self._check_mcp()

    def _read_host(self) -> None:
        """Take a host that is a Unix socket for --uds: unix:PATH as in candle-vllm, PATH.sock as in llama.cpp."""
        path = self.host.removeprefix("unix:").removeprefix("//")
        if path != self.host or path.endswith(".sock"):
            object.__setattr__(self, "host", _LOOPBACK)
            object.__setattr__(self, "uds", path if self.uds is None else self.uds)
        if self.uds is not None and (not self.uds or self.host != _LOOPBACK):
            raise ConfigError(f"give --uds a path, and leave --host out; got --uds {self.uds!r} --host {self.host}")

    @property
    def has_mcp(self) -> bool:
        return self.mcp_command is not None or self.mcp_config is not None

    def _check_mcp(self) -> None:
        if self.mcp_args is not None and self.mcp_command is None:
            raise ConfigError("--mcp-args has the arguments of --mcp-command; give that, too")
        if not self.has_mcp:
            return
        if not (self.mcp_command is None or self.mcp_command) or not (self.mcp_config is None or self.mcp_config):
            raise ConfigError("--mcp-command and --mcp-config must not be empty; leave them out to have no such tools")
        flag = "--mcp-command" if self.mcp_command is not None else "--mcp-config"
        if self.has_several_models or self.api_server_count > 1:
            raise ConfigError(f"{flag} is for a server with one model and --api-server-count 1; leave it out")
        if self.record_conversation:
            raise ConfigError(f"{flag} cannot be combined with --record-conversation; leave one of them out")

    def _refuse_pool_options(self) -> None:
        options = {option.name: option.default for option in fields(self)}
        for name in ("models_max", "models_autoload", "sleep_idle_seconds"):
            if getattr(self, name) != options[name]:
                raise ConfigError(
                    f"{flag_of(name)} is for a server with several models; give --models-dir or --models-preset, too"
                )

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if name == "port" or isinstance(value, bool) or not isinstance(value, int | float):
            return
        may_be_0 = name in ("shutdown_timeout", "hang_timeout", "thinking_budget")
        if not 0 <= value < float("inf") or (value == 0 and not may_be_0):
            raise ConfigError(f"{flag_of(name)} must be {'0 or more' if may_be_0 else 'above 0'}; got {value}")

    @classmethod
    def for_model(cls, model: str = BUILTIN_MODEL, **settings: Any) -> ServerSettings:
        """Return settings that serve the model under the name by which it is loaded, unless another one is given."""
        made = cls(**settings)
        has_name = bool(set(made.served_model_name) - {ANY_NAME})
        return made if has_name else replace(made, served_model_name=(model, *made.served_model_name))

    @property
    def has_several_models(self) -> bool:
        return self.models_dir is not None or self.models_preset is not None

    def body_limit(self, *, reads_images: bool) -> int:
        """Return the largest size of a body in bytes. reads_images: whether the model does."""
        if self.max_body_size is not None:
            return self.max_body_size
        return IMAGE_BODY_SIZE if reads_images else TEXT_BODY_SIZE

    def check_adapters(self, names: Iterable[str]) -> None:
        """Raise ConfigError if an adapter has a name of the model."""
        if twice := sorted(set(names) & set(self.served_model_name)):
            raise ConfigError(f"--lora-modules gives the name {twice[0]!r}, which is the model's; give another one")

    @property
    def model_name(self) -> str:
        """Name that responses carry."""
        return next(name for name in self.served_model_name if name != ANY_NAME)


# The sections of the help, as in config.SECTIONS.
SECTIONS = {
    "Server": "host",
    "Tools of MCP servers": "mcp_command",
    "Access": "api_key",
    "Limits": "max_body_size",
    "Prompts elsewhere": "prefill_url",
    "Logs and chat page": "log_format",
    "Several models": "models_dir",
}


def _parser_of_format(value: str) -> str:
    """llama.cpp's --reasoning-format."""
    if value not in ("none", "auto", "deepseek"):
        raise ConfigError(f"--reasoning-format must be auto, deepseek (the same) or none; got {value!r}")
    return "none" if value == "none" else "auto"


def _address(value: str) -> dict[str, Any]:
    """Return the fields of candle-vllm's --h: unix:PATH, a host, or a host and a port; IPv6 has brackets then."""
    if value.startswith("unix:"):
        return {"host": value}
    host, colon, port = value.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return {"host": value.strip("[]")}
    if not port.isdecimal():
        raise ConfigError(f"--h must be HOST or HOST:PORT; got {value!r}")
    return {"host": host.strip("[]"), "port": int(port)}


# Other names for ServerSettings' fields, as in other_names.ALIASES.
ALIASES: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "h": ("host", _address),
    "p": ("port", None),
    "alias": ("served_model_name", None),
    "cors_origins": ("allowed_origins", None),
    "reasoning_budget": ("thinking_budget", unless_negative),
    "reasoning_format": ("reasoning_parser", _parser_of_format),
    "disable_reasoning": ("thinking", opposite),
    "chat_template_file": ("chat_template", None),
    "otlp_traces_endpoint": ("otlp_endpoint", None),
    "h11_max_incomplete_event_size": ("max_header_size", in_bytes),
    "sse_ping_interval": ("sse_keep_alive_interval", None),
    "timeout_keep_alive": ("keep_alive_timeout", None),
    "enable_log_requests": ("log_requests", None),
    "disable_log_requests": ("log_requests", opposite),
    "webui": ("ui", None),
    "enforce_parser": ("tool_call_parser", None),
    "disable_fastapi_docs": ("docs", opposite),
    "ui_server": ("ui", None),
}
SHORT_FLAGS: dict[str, tuple[str, ...]] = {"alias": ("-a",), "api_server_count": ("-asc",)}
