"""`pagewick imatrix`: measures on a text how much each column of each weight matters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import Command
from pagewick.cli.completion import complete_model
from pagewick.cli.text_input import read_text, unreadable
from pagewick.cli.typed_flags import check_hub_flags
from pagewick.config import HUBS, EngineConfig
from pagewick.errors import ConfigError

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine
    from pagewick.text.tokenizer import Tokenizer

# Shorter steps are recorded and replayed (engine/graph/recorded.py), where nothing observes them.
LEAST_CHUNK = 65


@click.command(cls=Command)
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--text",
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A text like those that the model will read and write: 100,000 tokens are plenty.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("imatrix.gguf"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--chunk-size",
    type=click.IntRange(LEAST_CHUNK),
    default=512,
    show_default=True,
    help="Number of tokens that the model reads together.",
)
@click.option("--max-chunks", type=click.IntRange(1), help="Read this many of them only.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--num-threads", type=click.IntRange(1), help="Number of CPU threads.  [default: the machine's cores]")
@click.option("--revision", help="Branch, tag or commit of a model on a hub.")
@click.option("--hub", type=click.Choice(HUBS), default=HUBS[0], show_default=True, help="The model's hub.")
def command(
    model: str,
    text: Path,
    output: Path,
    chunk_size: int,
    max_chunks: int | None,
    force: bool,
    num_threads: int | None,
    revision: str | None,
    hub: str,
) -> None:
    """Write an importance matrix of MODEL: the mean squares of what its weights are multiplied by, on a text.

    pagewick quantize --imatrix makes the errors smallest where these are largest. The file is llama.cpp's, too.
    """
    from pagewick.cli.quantizing.hybrid import file_architecture
    from pagewick.cli.quantizing.metadata import text_config
    from pagewick.cli.quantizing.observation import Observation
    from pagewick.cli.quantizing.text_names import text_name
    from pagewick.engine.engine import Engine
    from pagewick.models.mtp_offers import holds_mtp
    from pagewick.models.registry import read_config
    from pagewick.text.tokenizer import Tokenizer
    from pagewick.weights.description import describe
    from pagewick.weights.gguf.importance import write_importance
    from pagewick.weights.gguf.writing import check_place
    from pagewick.weights.hub import resolve_model

    check_hub_flags(model)
    check_place(output, 0, is_forced=force)
    path = resolve_model(model, revision=revision, hub=hub)
    description = describe(path)
    config = read_config(text_config(description.config))
    file_architecture(config)  # before the model is loaded
    has_mtp = holds_mtp(config, [text_name(tensor.name) for tensor in description.tensors])
    chunk_size = min(chunk_size, config.max_position_embeddings - 1)
    chunks = read_chunks(text, Tokenizer.from_directory(path), chunk_size)[:max_chunks]
    options: dict[str, Any] = {
        "max_model_len": chunk_size + 1, "max_num_batched_tokens": chunk_size, "enable_prefix_caching": False,
        "speculative_method": "mtp" if has_mtp else None,
    }  # fmt: skip
    engine = Engine(EngineConfig.from_options(model=str(path), num_threads=num_threads, max_num_seqs=1, **options))
    observation = Observation(engine.model, config)
    label = f"reading {sum(map(len, chunks)):,} tokens"
    try:
        with click.progressbar(chunks, label=label, file=sys.stderr, show_pos=True) as bar:
            for index, chunk in enumerate(bar):
                read(engine, index, chunk)
    finally:
        observation.close()
        engine.close()
    write_importance(output, observation.sums, text.name, len(chunks), chunk_size, is_forced=force)
    click.echo(f"{output}: importance of {len(observation.sums)} weights, from {sum(map(len, chunks)):,} tokens")


def read_chunks(text: Path, tokenizer: Tokenizer, chunk_size: int) -> list[list[int]]:
    """Return a text's tokens in pieces of chunk_size; each begins as a text does. The last one may be shorter.

    Raises ConfigError for a file that is no text, or is too short.
    """
    try:
        token_ids = tokenizer.encode(read_text(text), add_special_tokens=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text}: {unreadable(error)}\n  give a file of UTF-8 text") from None
    start = tokenizer.start_token_ids
    size = chunk_size - len(start)
    chunks = [start + token_ids[first : first + size] for first in range(0, len(token_ids), size)]
    chunks = [chunk for chunk in chunks if len(chunk) >= LEAST_CHUNK]
    if not chunks:
        raise ConfigError(
            f"{text} has {len(token_ids)} tokens, and at least {LEAST_CHUNK} are needed; give a longer text"
        )
    return chunks


def read(engine: Engine, index: int, token_ids: Sequence[int]) -> None:
    """Let the model compute all tokens of a chunk."""
    from pagewick.engine.messages import EngineRequest
    from pagewick.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add(EngineRequest(request_id=str(index), prompt_token_ids=list(token_ids), params=params, seed=index))
    while engine.has_work:
        engine.step()
