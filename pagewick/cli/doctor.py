"""`pagewick doctor`: reports on this machine, or on a model, without loading the model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pagewick.cli.arguments import Command
from pagewick.cli.completion import complete_model
from pagewick.cli.flags import Size
from pagewick.cli.terminal_text import harmless_lines
from pagewick.cli.typed_flags import check_hub_flags
from pagewick.config import DEVICES, HUBS, EngineConfig
from pagewick.errors import PagewickError
from pagewick.number_formats import DTYPE_ALIASES, DTYPES, KV_CACHE_DTYPE_ALIASES, KV_CACHE_DTYPES

if TYPE_CHECKING:
    from pagewick.doctor.checkpoint import Checkpoint
    from pagewick.doctor.clusters import Cluster
    from pagewick.doctor.findings import Finding
    from pagewick.models.config import ModelConfig

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
DTYPE = click.Choice([*DTYPES, *DTYPE_ALIASES])
KV_CACHE_DTYPE = click.Choice([*KV_CACHE_DTYPES, *KV_CACHE_DTYPE_ALIASES])
# Flags that describe GPUs that are not here, and how a model runs on them.
ELSEWHERE = ("gpus", "nodes", "network_bandwidth", "num_experts_offload_per_rank")
# Flags that need a model.
MODEL_ONLY = (
    *("memory", "device", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "tensor_parallel_size"),
    *("pipeline_parallel_size", "max_num_seqs", "speculative_method", "num_speculative_tokens", "revision"),
)
# Models whose repositories have code in place of a chat template, which is not run: what to do.
_TEMPLATES = {
    "DeepseekV32ForCausalLM": "pagewick serve --chat-template FILE, with models/templates/"
    "deepseek-ai-DeepSeek-V3.2.jinja of llama.cpp",
    "DeepseekV4ForCausalLM": "pagewick serve --chat-template FILE, with models/templates/"
    "deepseek-ai-DeepSeek-V4.jinja of llama.cpp",
}
EXAMPLE = "pagewick doctor Qwen/Qwen3-30B-A3B --gpus 8xH100"
LEVEL = re.compile(r"^(?:ok|note|problem)(?= )", re.MULTILINE)
QUANTIZATION_HELP = "Plan with weights quantized at load: q8_0, q4_k_m, ... or auto (the best that fits)."
# A draft model needs memory of its own, which its own report counts.
PLANNED_METHODS = ("none", "ngram", "mtp")
TYPES = "Plan with auto (the model's), float32, bfloat16 or float16"


class Mistake(click.ClickException):
    """A wrong command line, shown without the usage of the command, which does not help here."""

    exit_code = 2


@click.command(cls=Command)
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--online", is_flag=True, help="Also check that the hub answers.")
@click.option("--memory", type=Size(), help="Plan with this much free memory, of a GPU or of the machine: 24GiB.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="Plan for this kind of device.")
@click.option("--dtype", type=DTYPE, metavar="TYPE", default="auto", help=f"{TYPES} for the weights.")
@click.option("--quantization", "--isq", "--quant", "-q", metavar="TYPE", help=QUANTIZATION_HELP)
@click.option(
    "--kv-cache-dtype", type=KV_CACHE_DTYPE, metavar="TYPE", default="auto",
    help="The same for the KV cache, or int8, fp8_e4m3, fp8_e5m2 or int4.",
)  # fmt: skip
@click.option("--max-model-len", type=click.IntRange(1), help="Plan for sequences of this many tokens.")
@click.option("--tensor-parallel-size", type=click.IntRange(1), help="Plan for this many ranks.")
@click.option(
    "--pipeline-parallel-size", type=click.IntRange(1), default=1,
    help="Plan for this many stages, each on a machine, or on GPUs, of its own.",
)  # fmt: skip
@click.option("--gpus", metavar="COUNTxKIND", help="Plan for GPUs that are not here: 8xH200, or 8xMine:48GiB:1008GB.")
@click.option("--nodes", type=click.IntRange(1), help="Number of machines, each with these GPUs.  [default: 1]")
@click.option(
    "--network-bandwidth", metavar="RATE", help="Rate from one of these GPUs to other nodes: 50GB per second."
)
@click.option(
    "--num-experts-offload-per-rank", type=click.IntRange(0), help="Plan with this many experts in host memory."
)
@click.option("--max-num-seqs", type=click.IntRange(1), help="Plan for this many sequences at once.  [default: 32]")
@click.option("--speculative-method", type=click.Choice(PLANNED_METHODS), help="Plan with draft tokens from there.")
@click.option("--num-speculative-tokens", type=click.IntRange(1), help="Plan with this many.")
@click.option("--revision", help="Branch, tag or commit of a model on a hub.")
@click.option("--hub", type=click.Choice(HUBS), default=HUBS[0], help="The hub that models come from.")
def command(model: str | None, as_json: bool, online: bool, **options: Any) -> None:
    """Report what this machine can run; with MODEL, whether and how that model runs on it.

    MODEL is a directory, a GGUF file, an id on a hub, or the built-in model. If a model is on a hub, only its
    description is fetched, never its weights; a directory may hold its config.json alone. With --gpus, the report is
    arithmetic for another machine: what fits there, what a step moves, and the upper limit of tokens per second that
    follows. The exit status is 1 if there is a problem.
    """
    if model is None:
        found, text = machine_report(online, options)
    else:
        found, text = model_report(model, options)
    text = harmless_lines(text)
    if not os.environ.get("NO_COLOR"):  # click leaves colours out where there is no terminal
        text = LEVEL.sub(lambda match: click.style(match[0], fg=COLOURS[match[0]]), text)
    click.echo(json.dumps(found, indent=2) if as_json else text)
    if not found["ok"]:
        raise click.exceptions.Exit(1)


def machine_report(online: bool, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The report on this machine as JSON and as text."""
    if flag := first_given(*ELSEWHERE, *MODEL_ONLY):
        raise Mistake(f"{flag} plans for a model, and no model is named; for example: {EXAMPLE}")
    from pagewick.doctor import report
    from pagewick.doctor.facts import collect
    from pagewick.doctor.machine import check_machine

    findings = check_machine(collect(os.environ, online=online, hub=options["hub"]))
    return report.machine_json(findings), report.machine_text(findings)


def model_report(model: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The report on a model as JSON and as text. Raises ModelLoadError and ConfigError."""
    from pagewick.doctor import checkpoint, report
    from pagewick.doctor.facts import collect
    from pagewick.doctor.machine import hindrances
    from pagewick.doctor.model import best_at_load, describe, device_of
    from pagewick.doctor.plan import Wishes

    if flag := first_given("online"):
        raise Mistake(f"{flag} is for the report on this machine: leave out the model, or {flag}")
    check_hub_flags(model)
    device, revision, hub = options["device"], options["revision"], options["hub"]
    cluster = cluster_of(options)
    found = checkpoint.open_checkpoint(model, os.environ, revision=revision, hub=hub)
    dtype, kv_cache_dtype = (
        None if (name := options[option]) == "auto" else aliases.get(name, name)
        for option, aliases in (("dtype", DTYPE_ALIASES), ("kv_cache_dtype", KV_CACHE_DTYPE_ALIASES))
    )
    drafting = EngineConfig.from_options(
        speculative_method=options["speculative_method"], num_speculative_tokens=options["num_speculative_tokens"]
    )
    if drafting.speculative_method == "mtp":
        found = checkpoint.with_predicting_layer(found)
    wishes = Wishes(
        options["max_model_len"],
        dtype,
        kv_cache_dtype,
        options["tensor_parallel_size"],
        options["max_num_seqs"],
        _largest_picture(found),
        0 if drafting.speculative_method == "none" else drafting.most_draft_tokens,
        options["pipeline_parallel_size"],
    )
    asked = EngineConfig(model=model, quantization=options["quantization"])
    mix = asked.for_weights(found.kind, {tensor.dtype for tensor in found.tensors}).quantization
    if mix not in (None, "auto"):
        found = checkpoint.quantized_at_load(found, mix)
    if cluster is not None and mix == "auto":
        raise Mistake("--quantization auto chooses for this machine: with --gpus, name a format, such as q4_k_m")
    if cluster is not None:
        described = describe(found, cluster, wishes, experts_per_rank=options["num_experts_offload_per_rank"] or 0)
        return report.model_json(described), report.model_text(described)
    facts = collect(os.environ, hub=hub)
    place = device_of(facts, memory=options["memory"], kind=None if device == "auto" else device)
    reasons: list[Finding] = []
    flags = [] if device == "auto" else ["--device", device]
    if mix == "auto":
        found, reasons = best_at_load(found, place, wishes)
    flags += [] if found.plan is None else ["--quantization", found.plan.mix]
    flags += _given_flags("speculative_method", "num_speculative_tokens", options=options)
    flags += ["--revision", revision] if revision is not None else []
    flags += ["--hub", hub] if hub != HUBS[0] else []
    hindering = [] if place.is_planned else hindrances(facts, found)
    hints = [*hindering, *reasons, *chat_findings(found), *image_findings(found)]
    described = describe(found, place, wishes, flags=flags, hindrances=hints)
    return report.model_json(described), report.model_text(described)


def chat_findings(found: Checkpoint) -> list[Finding]:
    """Findings about chats from the tokenizer and the chat template; none if they are not on this disk.

    The texts are loaded as a start loads them, with generation_config.json: what stops a start is a problem.
    """
    from pagewick.api_arguments import load_text
    from pagewick.doctor.findings import note, ok, problem
    from pagewick.doctor.support import refusal
    from pagewick.text.prompts import PromptEncoder

    place = Path(found.where)
    if found.is_only_described or not found.verdict.runs or not place.exists():
        return []
    try:
        tokenizer, template, *_ = load_text(EngineConfig(model=found.where), None)
    except PagewickError as error:
        refused = refusal(error)
        return [problem("files", refused.reason, refused.fix)]
    if found.model_config is not None and (purpose := _purpose(found.model_config)):
        return [ok(*purpose)]
    prompts = PromptEncoder(tokenizer, template, max_model_len=1)
    if (support := prompts.template_tools) is None:
        architecture = found.model_config.architecture if found.model_config else ""
        fix = _TEMPLATES.get(architecture, "pagewick serve --chat-template FILE, if this is a chat model")
        return [note("chat", "there is no chat template, so conversations are refused", fix)]
    calls = f"; calls have the format {prompts.call_format.name}"
    if support.lists_tools:
        findings = [ok("tools", f"the chat template describes them{calls}")]
    else:
        message = "the system message" if support.has_system else "the first message"
        findings = [note("tools", f"{message} describes them, because the chat template knows no tools{calls}")]
    if (tags := prompts.reasoning_tags) is not None:
        findings.append(ok("thoughts", f"they are between {tags.start} and {tags.end}"))
    return findings


def _purpose(model: ModelConfig) -> tuple[str, str] | None:
    """Return the name and the words of a finding about a model that writes no text; None for other models."""
    if model.embedding:
        vectors = {"cls": "the first token", "last": "the last token", "mean": "all tokens, as a mean"}
        return (
            "embeddings",
            f"they have {model.embedding_size:,} numbers, of {vectors[model.embedding]}; it writes no text",
        )
    if model.labels is not None:
        kind = "scores of pairs of texts" if model.labels.activation else f"{model.labels.num_labels} classes of texts"
        return "labels", f"{kind}; it writes no text"
    return None


def _largest_picture(found: Checkpoint) -> int | None:
    """Return the pixels of the largest picture that the model gets at once; None if no file on this disk says it."""
    from pagewick.images.settings_files import has_settings, read_settings

    place = Path(found.where)
    if found.model_config is None or found.model_config.vision is None or not place.is_dir():
        return None
    try:
        return read_settings(place).largest_picture if has_settings(place) else None
    except PagewickError:
        # image_findings says what is wrong with it.
        return None


def image_findings(found: Checkpoint) -> list[Finding]:
    """Findings about images from a model's files; none if it has no part that sees, or is not on this disk."""
    from pagewick.doctor.findings import note, ok, problem
    from pagewick.doctor.support import refusal
    from pagewick.images.settings_files import has_settings, read_settings
    from pagewick.text.tokenizer import Tokenizer

    place = Path(found.where)
    if found.model_config is None or found.model_config.vision is None or not place.is_dir():
        return []
    try:
        if not has_settings(place):
            fix = "download preprocessor_config.json, too"
            return [note("images", "they are refused, because preprocessor_config.json is missing", fix)]
        settings = read_settings(place)
    except PagewickError as error:
        refused = refusal(error)
        return [problem("images", refused.reason, refused.fix)]
    if settings.has_fixed_tokens:
        return [ok("images", f"each has {settings.max_tokens:,} tokens, whatever its size")]
    side = settings.token_side
    rows = " and one for every row of these" if settings.row_break else ""
    if not settings.tile_tokens:
        most = f"{settings.max_tokens:,} at most (--max-image-pixels)"
        return [ok("images", f"each has a token for every {side} x {side} pixels{rows}, {most}")]
    try:
        tokenizer = Tokenizer.from_directory(place)
    except PagewickError:
        # chat_findings says what is wrong with it.
        return []
    most_tokens = settings.most_tokens(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    most = f"{most_tokens:,} at most (--max-image-pixels)"
    return [ok("images", f"large ones are cut into tiles of {settings.tile_tokens} tokens, {most}")]


def _given_flags(*names: str, options: Mapping[str, Any]) -> list[str]:
    """Return the flags of options that are given, with their values."""
    given = ((f"--{name.replace('_', '-')}", options[name]) for name in names)
    return [word for flag, value in given if value is not None for word in (flag, str(value))]


def first_given(*names: str) -> str | None:
    """The first of these flags on the command line. One that comes from the environment may be meant for `serve`."""
    source = click.get_current_context().get_parameter_source
    return next((f"--{name.replace('_', '-')}" for name in names if source(name) is ParameterSource.COMMANDLINE), None)


def cluster_of(options: Mapping[str, Any]) -> Cluster | None:
    """The GPUs that --gpus describes, if it is given. Raises ConfigError."""
    from pagewick.doctor.clusters import parse_cluster, parse_rate

    gpus, nodes, bandwidth = options["gpus"], options["nodes"], options["network_bandwidth"]
    if gpus is None:
        if flag := first_given(*ELSEWHERE):
            raise Mistake(f"{flag} goes with --gpus; for example: {EXAMPLE}")
        return None
    if flag := first_given("memory", *([] if options["device"] == "cuda" else ["device"])):
        raise Mistake(f"--gpus says what the machine is, and so does {flag}: give one of them")
    network = None if bandwidth is None else parse_rate(bandwidth)
    if network is not None and (nodes or 1) == 1:
        raise Mistake("--network-bandwidth is between nodes: say how many with --nodes, or leave it out")
    return parse_cluster(gpus, nodes or 1, network)
