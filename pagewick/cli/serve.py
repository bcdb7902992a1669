"""`pagewick serve`: the OpenAI-compatible server. This process never imports torch; the engine has its own process."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import EngineCommand
from pagewick.cli.example_requests import KEY_VARIABLE, curl, curl_line, python_snippet
from pagewick.cli.process_arguments import hide_values
from pagewick.cli.serving.given import GivenFlags
from pagewick.config import EngineConfig
from pagewick.server.settings import ServerSettings

if TYPE_CHECKING:
    from pagewick.server.router.run import ReadyRouter
    from pagewick.server.run import ReadyServer

# Models that the first lines name.
_MAX_NAMED = 12
KEY_NOTE = f"Clients need an API key; these commands take it from {KEY_VARIABLE}:\n\n"


@click.command(cls=EngineCommand, has_settings=True, has_sampling=True, log_level="INFO")
def command(config: EngineConfig, settings: ServerSettings, sampling: dict[str, Any], given: GivenFlags) -> None:
    """Serve MODEL (default: the built-in one) over an OpenAI-compatible HTTP API.

    --models-dir and --models-preset serve several models, of which each is loaded when a request names it.
    The flags under Sampling are for requests that do not set these values.
    Ctrl-C or SIGTERM stops the server: running requests get a few seconds to finish, or none after a second Ctrl-C.
    """
    hide_values(["--api-key", "--prefill-api-key"])
    try:
        if settings.has_several_models:
            _serve_several(given, settings)
            return
        from pagewick.server.run import run_server

        run_server(config, settings, sampling=sampling, on_ready=partial(announce, settings.model_name))
    except KeyboardInterrupt:
        # Ctrl-C during the download of the model stops the server, too.
        return


def _serve_several(given: GivenFlags, settings: ServerSettings) -> None:
    from pagewick.cli.serving.several import SeveralModels
    from pagewick.server.router.run import run_router

    find_entries = SeveralModels.of(given, settings, click.get_current_context().command)
    run_router(find_entries, settings, on_ready=announce_several)


def announce_several(server: ReadyRouter) -> None:
    """Print the server's address, its models, and commands to paste to try it."""
    listed = ", ".join(server.names[:_MAX_NAMED]) + (", ..." if len(server.names) > _MAX_NAMED else "")
    key = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if server.needs_key else ""
    click.echo(
        f"\n{len(server.names)} models: {listed}\n"
        f"A model is loaded when a request names it.\n"
        f"Pagewick is ready on {server.address}\n\n"
        f"{KEY_NOTE if server.needs_key else ''}"
        f"{curl(server.address)}/v1/models{key}\n\n"
        "Ctrl-C stops the server."
    )


def announce(served_model_name: str, server: ReadyServer) -> None:
    """Print the server's address, the engine's sizes, and commands to paste to try it."""
    import psutil

    info = server.info
    num_tokens = info.num_kv_blocks * info.block_size
    seconds = time.time() - psutil.Process().create_time()
    parts = ", ".join(f"{name} {duration:.2f} s" for name, duration in info.timeline)
    click.echo(
        f"\n{served_model_name}: {info.architecture}, {info.num_parameters / 1e6:,.0f} M parameters, {info.types()} on "
        f"{info.device} ({info.kernels}), context {info.max_model_len:,} tokens\n"
        f"KV cache: {info.kv_cache_bytes / 2**20:,.0f} MiB for {num_tokens:,} tokens in {info.kv_cache_dtype}, which "
        f"is {num_tokens / info.max_model_len:.1f} requests of full length; up to {info.max_num_seqs} run at a time\n"
        f"Ready after {seconds:.2f} s; in the engine: {parts}\n"
        f"Pagewick is ready on {server.address}\n\n"
        f"{KEY_NOTE if server.needs_key else ''}"
        f"{curl_line(served_model_name, server)}\n\n"
        f"{python_snippet(served_model_name, server)}\n\n"
        "Ctrl-C stops the server."
    )
