"""`pagewick doctor`: reports on this machine, or on a model, without loading the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import Command
from pagewick.cli.flags import Size
from pagewick.config import DEVICES, DTYPE_ALIASES, DTYPES, HUBS

if TYPE_CHECKING:
    from pagewick.doctor.plan import Wishes

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
DTYPE = click.Choice([*DTYPES, *DTYPE_ALIASES])
# Flags that describe a machine that is not here, and how a model runs on it.
ELSEWHERE = ("gpus", "nodes", "network_bandwidth", "num_experts_offload_per_rank", "max_num_seqs")
TYPES = "Plan with auto (the model's), float32, bfloat16 or float16"


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--online", is_flag=True, help="Also check that the hub answers.")
@click.option("--memory", type=Size(), help="Plan with this much free memory, of a GPU or of the machine: 24GiB.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="Plan for this kind of device.")
@click.option("--dtype", type=DTYPE, metavar="TYPE", default="auto", help=f"{TYPES} for the weights.")
@click.option("--kv-cache-dtype", type=DTYPE, metavar="TYPE", default="auto", help="The same for the KV cache.")
@click.option("--max-model-len", type=click.IntRange(1), help="Plan for sequences of this many tokens.")
@click.option("--tensor-parallel-size", type=click.IntRange(1), help="Plan for this many ranks.")
@click.option("--gpus", metavar="COUNTxKIND", help="Plan for GPUs that are not here: 8xH200, or 8xMine:48GiB:1008GB.")
@click.option("--nodes", type=click.IntRange(1), help="Number of machines, each with these GPUs.  [default: 1]")
@click.option(
    "--network-bandwidth", metavar="RATE", help="Rate from one of these GPUs to other nodes: 50GB per second."
)
@click.option(
    "--num-experts-offload-per-rank", type=click.IntRange(0), help="Plan with this many experts in host memory."
)
@click.option("--max-num-seqs", type=click.IntRange(1), help="Plan for this many sequences at once.  [default: 32]")
@click.option("--revision", help="Branch, tag or commit of a model on a hub.")
@click.option("--hub", type=click.Choice(HUBS), default=HUBS[0], help="The hub that models come from.")
def command(model: str | None, as_json: bool, online: bool, **options: Any) -> None:
    """Report what this machine can run; with MODEL, whether and how that model runs on it.

    MODEL is a directory, a GGUF file, an id on a hub, or the built-in model. If a model is on a hub, only its
    description is fetched, never its weights; a directory may hold its config.json alone. With --gpus, the report is
    arithmetic for another machine: what fits there, what a step moves, and the upper limit of tokens per second that
    follows. The exit status is 1 if there is a problem.
    """
    elsewhere = {name: options.pop(name) for name in ELSEWHERE}
    if model is None or elsewhere["gpus"] is None:
        needless = [f"--{name.replace('_', '-')}" for name, value in elsewhere.items() if value is not None]
        if needless:
            raise click.UsageError(f"{needless[0]} goes with a model and --gpus, such as --gpus 8xH200")
    if model is None:
        found, text = machine_report(online, options["hub"])
    elif elsewhere["gpus"] is None:
        found, text = model_report(model, options)
    else:
        found, text = scale_report(model, options, **elsewhere)
    click.echo(json.dumps(found, indent=2) if as_json else text)
    if not found["ok"]:
        raise click.exceptions.Exit(1)


def machine_report(online: bool, hub: str) -> tuple[dict[str, Any], str]:
    """The report on this machine as JSON and as text."""
    from pagewick.doctor import report
    from pagewick.doctor.facts import collect
    from pagewick.doctor.machine import check_machine

    findings = check_machine(collect(os.environ, online=online, hub=hub))
    return report.machine_json(findings), report.machine_text(findings, style)


def model_report(model: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The report on a model on this machine as JSON and as text. Raises ModelLoadError and ConfigError."""
    from pagewick.doctor import report
    from pagewick.doctor.checkpoint import open_checkpoint
    from pagewick.doctor.facts import collect
    from pagewick.doctor.model import describe, device_of

    device, revision, hub = options["device"], options["revision"], options["hub"]
    checkpoint = open_checkpoint(model, os.environ, revision=revision, hub=hub)
    place = device_of(collect(os.environ), memory=options["memory"], kind=None if device == "auto" else device)
    flags = [] if device == "auto" else ["--device", device]
    flags += ["--revision", revision] if revision is not None else []
    flags += ["--hub", hub] if hub != HUBS[0] else []
    described = describe(checkpoint, place, wishes_of(options), flags)
    return report.model_json(described), report.model_text(described, style)


def scale_report(
    model: str,
    options: Mapping[str, Any],
    *,
    gpus: str,
    nodes: int | None,
    network_bandwidth: str | None,
    num_experts_offload_per_rank: int | None,
    max_num_seqs: int | None,
) -> tuple[dict[str, Any], str]:
    """The report on a model on GPUs that are not here as JSON and as text. Raises ModelLoadError and ConfigError."""
    from pagewick.doctor import checkpoint, scale_report
    from pagewick.doctor.clusters import parse_cluster, parse_rate
    from pagewick.doctor.plan import MAX_NUM_SEQS

    if options["memory"] is not None or options["device"] not in ("auto", "cuda"):
        other = "--memory" if options["memory"] is not None else f"--device {options['device']}"
        raise click.UsageError(f"--gpus says what the machine is, and so does {other}: give one of them")
    network = None if network_bandwidth is None else parse_rate(network_bandwidth)
    if network is not None and (nodes or 1) == 1:
        raise click.UsageError("--network-bandwidth is between nodes: say how many with --nodes, or leave it out")
    cluster = parse_cluster(gpus, nodes or 1, network)
    described = scale_report.describe_scale(
        checkpoint.open_checkpoint(model, os.environ, revision=options["revision"], hub=options["hub"]),
        cluster,
        wishes_of(options),
        num_sequences=max_num_seqs or MAX_NUM_SEQS,
        experts_per_rank=num_experts_offload_per_rank or 0,
    )
    return scale_report.scale_json(described), scale_report.scale_text(described, style)


def wishes_of(options: Mapping[str, Any]) -> Wishes:
    """The user's decisions among the options; a dtype of auto is none."""
    from pagewick.doctor.plan import Wishes

    dtypes = [DTYPE_ALIASES.get(name := options[option], name) for option in ("dtype", "kv_cache_dtype")]
    dtype, kv_cache_dtype = (None if name == "auto" else name for name in dtypes)
    return Wishes(options["max_model_len"], dtype, kv_cache_dtype, options["tensor_parallel_size"])


def style(text: str, level: str) -> str:
    """Colour for a terminal; click leaves it out elsewhere, and NO_COLOR switches it off."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=COLOURS[level])
