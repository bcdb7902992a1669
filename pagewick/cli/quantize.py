"""`pagewick quantize`: writes a model as a GGUF file, in one of its types."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pagewick.cli.arguments import Command
from pagewick.cli.completion import complete_model
from pagewick.cli.typed_flags import check_hub_flags
from pagewick.config import BUILTIN_MODEL, HUBS
from pagewick.weights.progress import default_progress, format_bytes


def complete_type(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a type."""
    from pagewick.weights.gguf.export import TYPES

    return [CompletionItem(name) for name in TYPES if name.startswith(begun)]


@click.command(cls=Command)
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--to",
    "kind",
    metavar="TYPE",
    default="q4_k_m",
    show_default=True,
    shell_complete=complete_type,
    help="f32, f16, bf16, q8_0, q6_k, q5_k_m, q5_k_s, q5_1, q5_0, q4_k_m, q4_k_s, q4_1, q4_0, q3_k_l, q3_k_m, q3_k_s, "
    "q2_k or q2_k_s; q5_k, q4_k and q3_k are one type for all matrices.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file to write.  [default: the model's name and the type, here]",
)
@click.option(
    "--imatrix",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Weigh errors by this importance matrix, from pagewick imatrix or llama.cpp.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--num-threads", type=click.IntRange(1), help="Number of CPU threads.  [default: the machine's cores]")
@click.option("--revision", help="Branch, tag or commit of a model on a hub.")
@click.option("--hub", type=click.Choice(HUBS), default=HUBS[0], show_default=True, help="The model's hub.")
def command(
    model: str,
    kind: str,
    output: Path | None,
    imatrix: Path | None,
    force: bool,
    num_threads: int | None,
    revision: str | None,
    hub: str,
) -> None:
    """Write MODEL as a GGUF file with its tokenizer and chat template, for Pagewick, llama.cpp and other programs.

    MODEL is a directory with safetensors, a GGUF file in F32, F16 or BF16, an id on a hub, or the built-in model.
    Checkpoints in GPTQ, AWQ, FP8 and other formats are quantized again, from their numbers. The file appears when it is
    complete.

    \b
    pagewick quantize Qwen/Qwen3-0.6B --to q4_k_m -o qwen3.gguf
    pagewick imatrix Qwen/Qwen3-0.6B --text notes.txt -o imatrix.gguf
    pagewick quantize Qwen/Qwen3-0.6B --to q3_k_m --imatrix imatrix.gguf
    """
    check_hub_flags(model)
    write_file(model, kind, output, imatrix, force=force, num_threads=num_threads, revision=revision, hub=hub)


def write_file(
    model: str,
    kind: str,
    output: Path | None,
    imatrix: Path | None,
    *,
    force: bool = False,
    num_threads: int | None = None,
    revision: str | None = None,
    hub: str = HUBS[0],
) -> None:
    """Write a model as a GGUF file, and a line about it. Parameters and errors are those of the command."""
    from pagewick.cli.quantizing.plan import check_output, planned_export
    from pagewick.weights.gguf.export import type_named, written_types
    from pagewick.weights.gguf.importance import read_importance
    from pagewick.weights.gguf.writing import check_place
    from pagewick.weights.hub import resolve_model

    kind = type_named(kind)
    name = model_name(model)
    output = output or Path(f"{name}-{kind.upper()}.gguf")
    check_place(output, 0, is_forced=force)
    importance = None if imatrix is None else read_importance(imatrix)
    path = resolve_model(model, revision=revision, hub=hub)
    check_output(path, output)
    use_threads(num_threads)
    started = time.monotonic()
    with interruptible(), planned_export(path, name, kind, importance) as (export, notes):
        for note in notes:
            click.echo(f"note: {note}", err=True)
        num_bytes = export.write(output, is_forced=force, progress=default_progress())
    types = ", ".join(f"{count} {name}" for name, count in written_types(export.types))
    seconds = time.monotonic() - started
    click.echo(f"{output}: {format_bytes(num_bytes)}; tensors: {types}; {seconds:.1f} s")


def model_name(model: str) -> str:
    """Return a short name for a model: that of its directory or file, or the last part of its id."""
    if model == BUILTIN_MODEL:
        return model
    path = Path(model)
    name = path.resolve().name if path.exists() else model.rpartition("/")[2]
    return name.removesuffix(".gguf").replace(":", "-") or "model"


def use_threads(num_threads: int | None) -> None:
    import torch

    from pagewick import kernels
    from pagewick.devices import num_cores

    count = num_threads or num_cores()
    torch.set_num_threads(count)
    kernels.set_num_threads(count)


class interruptible:
    """Within it, SIGTERM ends the command as Ctrl-C does, so that it removes what it has begun."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __exit__(self, *failure: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)
