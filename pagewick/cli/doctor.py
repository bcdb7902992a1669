"""`pagewick doctor`: this machine, or a model on it, before anything is loaded."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import Command
from pagewick.cli.flags import Flag, Size
from pagewick.config import DEVICES, DTYPE_ALIASES, DTYPES, HUBS

if TYPE_CHECKING:
    from pagewick.doctor.facts import Facts

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
DTYPE = click.Choice([*DTYPES, *DTYPE_ALIASES])
# Flags that describe a machine that is not here, and what runs on it.
ELSEWHERE = ("gpus", "nodes", "network_bandwidth", "num_experts_offload_per_rank", "max_num_seqs")
TYPES = "Plan with auto (the model's), float32, bfloat16 or float16"


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--online", is_flag=True, help="Also try whether the hub answers.")
@click.option("--memory", type=Size(), help="Plan with so much free memory, of a GPU or of the machine: 24GiB.")
@click.option("--device", cls=Flag, type=click.Choice(DEVICES), default="auto", help="Plan for this kind of device.")
@click.option("--dtype", cls=Flag, type=DTYPE, metavar="TYPE", default="auto", help=f"{TYPES} for the weights.")
@click.option(
    "--kv-cache-dtype", cls=Flag, type=DTYPE, metavar="TYPE", default="auto", help="The same for the KV cache."
)
@click.option("--max-model-len", cls=Flag, type=click.IntRange(1), help="Plan for sequences of so many tokens.")
@click.option("--tensor-parallel-size", cls=Flag, type=click.IntRange(1), help="Plan for so many ranks.")
@click.option("--gpus", metavar="COUNTxKIND", help="Plan for GPUs that are not here: 8xH200, or 8xMine:48GiB:1008GB.")
@click.option("--nodes", type=click.IntRange(1), help="So many machines, each with these GPUs.  [default: 1]")
@click.option("--network-bandwidth", metavar="RATE", help="Of one of these GPUs to other nodes, per second: 50GB.")
@click.option("--num-experts-offload-per-rank", type=click.IntRange(0), help="Plan with so many in host memory.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Plan for so many sequences at once.  [default: 32]")
@click.option("--revision", cls=Flag, help="Branch, tag or commit of a model on a hub.")
@click.option("--hub", cls=Flag, type=click.Choice(HUBS), default=HUBS[0], help="Where models come from.")
def command(model: str | None, as_json: bool, online: bool, **wishes: Any) -> None:
    """Say what this machine can run; with MODEL, whether and how that model runs on it.

    MODEL is a directory, a GGUF file, an id on a hub, or the built-in model. Of a model on a hub only its description
    is fetched, never its weights; a directory may hold its config.json alone. With --gpus, what is said is arithmetic
    for another machine: what fits there, what a step moves, and how many tokens per second that allows at most. The
    exit status is 1 if there is a problem.
    """
    elsewhere = {name: wishes.pop(name) for name in ELSEWHERE}
    if model is None or elsewhere["gpus"] is None:
        needless = [f"--{name.replace('_', '-')}" for name, value in elsewhere.items() if value is not None]
        if needless:
            raise click.UsageError(f"{needless[0]} goes with a model and --gpus, such as --gpus 8xH200")
    if model is None:
        is_good = show_machine(as_json, online, wishes["hub"])
    elif elsewhere["gpus"] is None:
        is_good = show_model(model, as_json, **wishes)
    else:
        is_good = show_scale(model, as_json, **wishes, **elsewhere)
    if not is_good:
        raise click.exceptions.Exit(1)


def show_machine(as_json: bool, online: bool, hub: str) -> bool:
    """Print what is found; return whether nothing is a problem."""
    from pagewick.doctor import report
    from pagewick.doctor.facts import collect
    from pagewick.doctor.machine import check_machine

    findings = check_machine(collect(os.environ, online=online, hub=hub))
    found = report.machine_json(findings)
    click.echo(json.dumps(found, indent=2) if as_json else report.machine_text(findings, style))
    return bool(found["ok"])


def show_model(
    model: str,
    as_json: bool,
    *,
    memory: int | None,
    device: str,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int | None,
    tensor_parallel_size: int | None,
    revision: str | None,
    hub: str,
) -> bool:
    """Print what is known of a model; return whether it runs here. Raises ModelLoadError and ConfigError."""
    from pagewick.doctor import report
    from pagewick.doctor.checkpoint import open_checkpoint
    from pagewick.doctor.model import describe, device_of
    from pagewick.doctor.plan import Wishes

    checkpoint = open_checkpoint(model, os.environ, revision=revision, hub=hub)
    wishes = Wishes(max_model_len, type_of(dtype), type_of(kv_cache_dtype), tensor_parallel_size)
    place = device_of(facts_of_memory(), memory=memory, kind=None if device == "auto" else device)
    flags = [] if device == "auto" else ["--device", device]
    flags += ["--revision", revision] if revision is not None else []
    flags += ["--hub", hub] if hub != HUBS[0] else []
    described = describe(checkpoint, place, wishes, flags)
    if as_json:
        click.echo(json.dumps(report.model_json(described), indent=2))
    else:
        click.echo(report.model_text(described, style))
    return not described.problem


def show_scale(
    model: str,
    as_json: bool,
    *,
    memory: int | None,
    device: str,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int | None,
    tensor_parallel_size: int | None,
    revision: str | None,
    hub: str,
    gpus: str,
    nodes: int | None,
    network_bandwidth: str | None,
    num_experts_offload_per_rank: int | None,
    max_num_seqs: int | None,
) -> bool:
    """Print a plan for GPUs that are not here; return whether it works. Raises ModelLoadError and ConfigError."""
    from pagewick.doctor import scale_report
    from pagewick.doctor.checkpoint import open_checkpoint
    from pagewick.doctor.clusters import parse_cluster, parse_rate
    from pagewick.doctor.plan import MAX_NUM_SEQS, Wishes

    if memory is not None or device not in ("auto", "cuda"):
        other = "--memory" if memory is not None else f"--device {device}"
        raise click.UsageError(f"--gpus says what the machine is, and so does {other}: give one of them")
    network = None if network_bandwidth is None else parse_rate(network_bandwidth)
    if network is not None and (nodes or 1) == 1:
        raise click.UsageError("--network-bandwidth is between nodes: say how many with --nodes, or leave it out")
    cluster = parse_cluster(gpus, nodes or 1, network)
    checkpoint = open_checkpoint(model, os.environ, revision=revision, hub=hub)
    described = scale_report.describe_scale(
        checkpoint,
        cluster,
        Wishes(max_model_len, type_of(dtype), type_of(kv_cache_dtype), tensor_parallel_size),
        num_sequences=max_num_seqs or MAX_NUM_SEQS,
        experts_per_rank=num_experts_offload_per_rank or 0,
    )
    if as_json:
        click.echo(json.dumps(scale_report.scale_json(described), indent=2))
    else:
        click.echo(scale_report.scale_text(described, style))
    return not described.problem


def facts_of_memory() -> Facts:
    """This machine; its own function, so that tests can put another in its place."""
    from pagewick.doctor.facts import collect

    return collect(os.environ)


def type_of(name: str) -> str | None:
    """A dtype by its usual name; None for auto."""
    return None if name == "auto" else DTYPE_ALIASES.get(name, name)


def style(text: str, level: str) -> str:
    """Colour for a terminal; click leaves it out elsewhere, and with NO_COLOR."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=COLOURS[level])
