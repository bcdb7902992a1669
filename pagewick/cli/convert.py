"""`pagewick convert`: writes a model as a quantized checkpoint: GPTQ, AWQ, Marlin or GGUF."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from pagewick.cli.arguments import Command
from pagewick.cli.completion import complete_model
from pagewick.cli.quantize import complete_type, interruptible, use_threads, write_file
from pagewick.cli.typed_flags import check_hub_flags, typed_flags
from pagewick.config import HUBS
from pagewick.errors import ConfigError
from pagewick.weights.progress import default_progress, format_bytes

TARGETS: Final = ("gptq", "awq", "marlin", "gguf")
METHODS: Final = ("gptq", "awq", "rtn")
# Options of one kind of target only.
_OF_GGUF: Final = ("type", "imatrix")
_OF_TEXT: Final = ("text", "num_tokens", "seed")
_OF_OTHERS: Final = ("method", "bits", "group", "sym", "act_order", *_OF_TEXT, "resume")


@click.command(cls=Command)
@click.argument("source", metavar="SRC", shell_complete=complete_model)
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(TARGETS), required=True, help="The format of DST.")
@click.option("--method", type=click.Choice(METHODS), help="How levels are chosen.  [default: awq for awq, else gptq]")
@click.option("--bits", type=int, help="Size of a weight: 2, 3, 4 or 8; awq and marlin have 4.  [default: 4]")
@click.option("--group", type=int, help="Columns that share a scale: 32, 64, 128, or -1 for all.  [default: 128]")
@click.option("--sym/--no-sym", default=None, help="Without, or with zero points.  [default: --no-sym for awq]")
@click.option("--act-order", is_flag=True, help="Let GPTQ begin with the columns that matter most.")
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Calibrate on this text, one like those that the model will read and write.  [default: a built-in one]",
)
@click.option("--num-tokens", type=click.IntRange(1), help="Tokens of the text to read.  [default: 4096]")
@click.option("--seed", type=int, help="Choose other parts of the text.  [default: 0]")
@click.option("--resume/--no-resume", default=True, help="Use what an interrupted run has written.  [default: resume]")
@click.option("--type", shell_complete=complete_type, help="With --to gguf: its type.  [default: q4_k_m]")
@click.option(
    "--imatrix",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --to gguf: weigh errors by this importance matrix.",
)
@click.option("--num-threads", type=click.IntRange(1), help="Number of CPU threads.  [default: the machine's cores]")
@click.option("--revision", help="Branch, tag or commit of a model on a hub.")
@click.option("--hub", type=click.Choice(HUBS), default=HUBS[0], show_default=True, help="The model's hub.")
def command(
    source: str,
    target: Path,
    to: str,
    num_threads: int | None,
    revision: str | None,
    hub: str,
    **options: Any,
) -> None:
    """Write SRC as a quantized checkpoint DST, for Pagewick, vLLM, transformers and other programs.

    SRC is a directory with safetensors, an id on a hub, or the built-in model. Its weights are quantized layer by
    layer, so that each layer's outputs on a text stay close. A GPTQ or AWQ checkpoint is repacked instead, with the
    same numbers. DST is a new directory, or with --to gguf a new file; it appears when it is complete. A run that was
    interrupted goes on where it stopped.

    \b
    pagewick convert Qwen/Qwen3-0.6B qwen3-gptq --to gptq --text notes.txt
    pagewick convert Qwen/Qwen3-0.6B qwen3-awq --to awq --group 64
    pagewick convert qwen3-gptq qwen3-marlin --to marlin
    """
    typed = typed_flags(click.get_current_context())
    _check_effects(to, options["method"], typed)
    check_hub_flags(source)
    from pagewick.weights.unfinished import check_place

    check_place(target)
    if to == "gguf":
        kind, imatrix = options["type"] or "q4_k_m", options["imatrix"]
        write_file(source, kind, target, imatrix, num_threads=num_threads, revision=revision, hub=hub)
        return
    from pagewick.cli.converting.conversion import Conversion

    given = {name: options[name] for name in _OF_OTHERS if options[name] is not None}
    names = {"group": "group_size", "sym": "symmetric", "resume": "is_resumed"}
    wanted = Conversion(to=to, typed=typed, **{names.get(name, name): value for name, value in given.items()})
    use_threads(num_threads)
    write_checkpoint(source, target, wanted, revision=revision, hub=hub)


def _check_effects(to: str, method: str | None, typed: Mapping[str, str]) -> None:
    """Raise ConfigError for an option on the command line that has no effect on any source.

    typed: the options on the command line, each with its flag.
    """
    foreign = _OF_OTHERS if to == "gguf" else _OF_GGUF
    if flag := next((typed[name] for name in foreign if name in typed), None):
        fix = "--type and --imatrix choose how GGUF files are quantized" if to == "gguf" else "it is for --to gguf"
        raise ConfigError(f"{flag} has no effect with --to {to}\n  leave it out; {fix}")
    if method == "rtn" and (flag := next((typed[name] for name in _OF_TEXT if name in typed), None)):
        fix = "choose another method, which calibrates on a text"
        raise ConfigError(f"{flag} has no effect with --method rtn, which reads no text\n  leave it out, or {fix}")


def write_checkpoint(
    source: str, target: Path, wanted: Any, *, revision: str | None = None, hub: str = HUBS[0]
) -> None:
    """Write a model as the checkpoint that a Conversion describes, and lines about it."""
    from pagewick.cli.converting.conversion import convert
    from pagewick.weights.hub import resolve_model

    started = time.monotonic()
    path = resolve_model(source, revision=revision, hub=hub)

    def note(text: str) -> None:
        click.echo(f"note: {text}", err=True)

    with interruptible():
        done = convert(path, target, wanted, progress=default_progress(), note=note)
    seconds = time.monotonic() - started
    click.echo(f"{target}: {format_bytes(done.num_bytes)}; {done.num_weights} weights as {done.label}; {seconds:.1f} s")
