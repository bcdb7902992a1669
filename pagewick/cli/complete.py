"""`pagewick complete`: responses to prompts: to a few, to a file of them, or to a batch of requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import ENGINE_FLAGS, SAMPLING_FLAGS, EngineCommand
from pagewick.cli.sources import give_way, sources_of
from pagewick.cli.terminal_text import shown_on
from pagewick.cli.text_input import STDIN, is_decoded, opened_text
from pagewick.cli.typed_flags import typed_flags
from pagewick.config import EngineConfig
from pagewick.engine.messages import RequestOptions
from pagewick.errors import ConfigError
from pagewick.sampling_params import MAX_CHOICES

if TYPE_CHECKING:
    from pagewick.outputs import RequestOutput


@click.command(cls=EngineCommand, has_sampling=True)
@click.option("--prompts", help="Prompts, separated by |.")
@click.option("-p", "--prompt", "prompt", multiple=True, help="One prompt, taken unchanged; - reads it from stdin.")
@click.option("--file", help="File with a prompt on each line; - is stdin.")
@click.option("--separator", help=r"Text between the prompts of --file.  [default: \n]")
@click.option(
    "--batch",
    help="File with a request on each line (JSON, OpenAI's or simple); - is stdin. With a number: a benchmark.",
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="File for the responses.  [default: stdout]"
)
@click.option("--resume", is_flag=True, help="Continue an existing --output: skip what it has, repeat what failed.")
@click.option("--n", "num_choices", type=click.IntRange(1, MAX_CHOICES), help="Number of responses to each prompt.")
@click.option(
    "--json-schema",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with a JSON schema that every response must have.",
)
@click.option("--chat", is_flag=True, help="Send each prompt as a user's message to a chat model.")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with an image that goes with each prompt, as --chat sends it; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each response.")
def command(
    config: EngineConfig,
    prompts: str | None,
    prompt: tuple[str, ...],
    file: str | None,
    separator: str | None,
    batch: str | None,
    output: Path | None,
    resume: bool,
    num_choices: int | None,
    json_schema: Path | None,
    chat: bool,
    images: tuple[Path, ...],
    as_json: bool,
    sampling: dict[str, Any],
) -> None:
    """Complete prompts with MODEL (default: the built-in one) and print the responses in order.

    \b
    pagewick complete --chat --prompts "What is Pagewick? | How do I install it?"
    echo "Pagewick is" | pagewick complete -p - --max-tokens 40
    pagewick complete --batch requests.jsonl --output responses.jsonl
    pagewick complete -m Qwen/Qwen3-VL-2B-Instruct --image photo.jpg -p "Describe it."
    """
    ctx = click.get_current_context()
    # A variable of another run must not stand in the way of a prompt on the command line.
    ways = [option for option in ctx.command.params if option.name in ("prompts", "prompt", "file", "batch")]
    lost = {option.name for option in give_way(ctx, [option for option in ways if ctx.params[option.name or ""]])}
    prompts, file, batch = (
        None if name in lost else value for name, value in (("prompts", prompts), ("file", file), ("batch", batch))
    )
    prompt = () if "prompt" in lost else prompt
    _check_flags(typed_flags(ctx), file=file, batch=batch, output=output)
    sampling |= {"n": num_choices} if num_choices is not None else {}
    if json_schema is not None and batch is None:
        from pagewick.cli.completing.schema import read_schema

        sampling["structured_outputs"] = {"json": read_schema(json_schema, config)}
    texts = [text.strip() for text in prompts.split("|")] if prompts is not None else []
    texts += [_text_of_stdin() if text == STDIN else text for text in prompt]
    texts = [text for text in texts if text]
    if not all(map(is_decoded, texts)):
        raise click.UsageError("a prompt is not UTF-8; convert it first.")
    given = [name for name, value in (("--prompts or -p", texts), ("--file", file), ("--batch", batch)) if value]
    if not given and " " in config.model:
        raise click.UsageError(f"{config.model[:80]!r} stands where a model does; a prompt comes after -p.")
    if not given:
        raise click.UsageError(
            'nothing to complete; add --prompts "first | second", -p - (which reads stdin), --file or --batch.'
        )
    if len(given) > 1:
        message = f"{' and '.join(given)} cannot be combined; give one of them"
        raise click.UsageError(f"{message}{sources_of(ctx, ConfigError(message))}.")
    if batch is not None and batch.isdecimal() and not Path(batch).exists():
        _measure(ctx, config, batch, sampling)
        return
    if file is None and batch is None:
        contents = _contents(texts, images, is_chat=chat)
        _complete_texts(config, texts, contents, sampling, as_json=as_json, has_images=bool(images))
        return
    from pagewick.cli.completing.files import run_batch_file, run_prompt_file, unescaped

    if batch is not None:
        tally = run_batch_file(config, batch, output=output, resumes=resume, fields=sampling)
    else:
        assert file is not None, "one of them is given"
        parts = "\n" if separator is None else unescaped(separator)
        tally = run_prompt_file(
            config, file, separator=parts, chat=chat, as_json=as_json, output=output, fields=sampling
        )
    if tally.has_failures:
        raise ConfigError(f"{tally.text}; the output says why for each of them")


def _check_flags(typed: Collection[str], *, file: str | None, batch: str | None, output: Path | None) -> None:
    """Raise click.UsageError for a flag on the command line that has no effect beside the others.

    typed: the names of the flags on the command line.
    """
    if batch is not None and "json_schema" in typed:
        raise click.UsageError("--json-schema has no meaning with --batch: its lines have a response_format.")
    if "separator" in typed and file is None:
        raise click.UsageError("--separator needs --file.")
    if "output" in typed and file is None and batch is None:
        raise click.UsageError("--output needs --file or --batch; redirect stdout instead.")
    if "images" in typed and file is not None:
        raise click.UsageError("--image goes with --prompts or -p; the prompts of --file have no images.")
    if "images" in typed and batch is not None:
        raise click.UsageError("--image goes with --prompts or -p; the lines of --batch have images of their own.")
    if "resume" in typed and (batch is None or output is None):
        raise click.UsageError("--resume needs --batch and --output.")
    if batch is not None and not {"chat", "as_json"}.isdisjoint(typed):
        name = "--chat" if "chat" in typed else "--json"
        raise click.UsageError(
            f"{name} has no meaning with --batch: its lines say what they are, and its output is JSON."
        )


def _measure(ctx: click.Context, config: EngineConfig, batch: str, sampling: Mapping[str, Any]) -> None:
    """Measure a number of requests at once. Raises click.UsageError for flags on the command line without effect."""
    from pagewick.cli.bench import bench_batch

    names = {"output", "num_choices"} & typed_flags(ctx).keys() | {"seed"} & ENGINE_FLAGS.typed(ctx).keys()
    if names | SAMPLING_FLAGS.typed(ctx).keys() - {"max_tokens"}:
        raise click.UsageError(f"--batch {batch} measures greedy tokens; of the flags here it takes --max-tokens.")
    bench_batch(config, int(batch), sampling.get("max_tokens"))


def _text_of_stdin() -> str:
    with opened_text(STDIN) as file:
        return file.read().removesuffix("\n")


def _contents(texts: list[str], images: Collection[Path], *, is_chat: bool) -> list[Any] | None:
    """Return the content of a user's message for each text; None if texts are continued. Raises ConfigError."""
    from pagewick.cli.image_file import image_part, with_images

    parts = [image_part(path) for path in images]
    return [with_images(text, parts) for text in texts] if is_chat or parts else None


def _complete_texts(
    config: EngineConfig,
    texts: list[str],
    contents: list[Any] | None,
    sampling: dict[str, Any],
    *,
    as_json: bool,
    has_images: bool,
) -> None:
    """Stream the response to a single prompt; complete several in one batch, and show a progress bar on a terminal.

    contents: those of the messages that are sent in place of the texts; None continues the texts.
    """
    from pagewick.llm import LLM

    conversations = [[{"role": "user", "content": content}] for content in contents or ()]
    options = RequestOptions(lowers_max_tokens=True)
    with LLM(config=config) as llm:
        if has_images and llm.info.image_token_id is None:
            raise ConfigError(_no_images(config))
        params = replace(llm.get_default_sampling_params(), **sampling)
        if len(texts) == 1 and not as_json and params.n == 1:
            for piece in llm.stream(conversations[0] if conversations else texts[0], params, options=options):
                click.echo(shown_on(sys.stdout, piece), nl=False)
            click.echo()
            return
        use_tqdm = sys.stderr.isatty() and len(texts) > 1
        if conversations:
            outputs = llm.chat(conversations, params, use_tqdm=use_tqdm, options=options)
        else:
            outputs = llm.generate(texts, params, use_tqdm=use_tqdm, options=options)
    for text, output in zip(texts, outputs, strict=True):
        if as_json:
            lines = list(_json_lines(text, output))
        else:
            lines = [f"> {text}", *(choice.text.strip() for choice in output.outputs), ""]
        click.echo(shown_on(sys.stdout, "\n".join(lines)))


def _no_images(config: EngineConfig) -> str:
    if config.language_model_only:
        return "--language-model-only leaves out the part of the model that sees; leave out this flag, or --image"
    return f"{config.model} reads text only; leave out --image, or name a model that reads images"


def _json_lines(text: str, output: RequestOutput) -> Iterator[str]:
    for choice in output.outputs:
        record: dict[str, Any] = {"prompt": text, "text": choice.text, "finish_reason": choice.finish_reason}
        record |= {"reasoning": choice.reasoning} if choice.reasoning else {}
        record |= {"index": choice.index} if len(output.outputs) > 1 else {}
        record |= {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(choice.token_ids)}
        yield json.dumps(record, ensure_ascii=False)
