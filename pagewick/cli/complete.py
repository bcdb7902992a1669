"""`pagewick complete`: prompts in, answers out; a few, a file of them, or a batch of requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import EngineCommand, Flag
from pagewick.cli.terminal_text import shown_on
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from pagewick.sampling_params import MAX_CHOICES

if TYPE_CHECKING:
    from pagewick.cli.completing.whole_file import Tally
    from pagewick.llm import LLM
    from pagewick.outputs import RequestOutput
    from pagewick.sampling_params import SamplingParams


@click.command(cls=EngineCommand, has_sampling=True)
@click.option("--prompts", cls=Flag, help="Prompts, separated by |.")
@click.option("-p", "--prompt", "prompt", multiple=True, help="One prompt as it is; - reads it from stdin.")
@click.option("--file", "file", help="A file with a prompt on each line; - is stdin.")
@click.option("--separator", help=r"What parts the prompts of --file  [default: \n]")
@click.option("--batch", help="A file with a request on each line (JSONL, OpenAI's or simple); - is stdin.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Where the answers go  [default: stdout]"
)
@click.option("--resume", is_flag=True, help="Go on with an --output that is there: skip the custom_ids that it has.")
@click.option("--n", "num_choices", cls=Flag, type=click.IntRange(1, MAX_CHOICES), help="Answers to each prompt.")
@click.option("--chat", cls=Flag, is_flag=True, help="Take each prompt as a user's message to a chat model.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per answer.")
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
    chat: bool,
    as_json: bool,
    sampling: dict[str, Any],
) -> None:
    """Complete prompts with MODEL (default: the built-in one) and print the answers in order.

    \b
    pagewick complete --chat --prompts "What is Pagewick? | How do I install it?"
    echo "Once upon a time" | pagewick complete -p - --max-tokens 40
    pagewick complete --batch requests.jsonl --output answers.jsonl
    """
    sampling |= {"n": num_choices} if num_choices is not None else {}
    texts = read_prompts(prompts, prompt)
    _check_source(texts, file, batch)
    _check_options(file, batch, output, separator=separator, resume=resume, chat=chat, as_json=as_json)
    if file is None and batch is None:
        _complete_texts(config, texts, sampling, chat=chat, as_json=as_json)
        return
    from pagewick.cli.completing.prompt_files import unescaped
    from pagewick.cli.completing.whole_file import run_batch_file, run_prompt_file

    if batch is not None:
        _report(run_batch_file(config, batch, output=output, resumes=resume, fields=sampling))
    elif file is not None:
        parts = "\n" if separator is None else unescaped(separator)
        _report(
            run_prompt_file(config, file, separator=parts, chat=chat, as_json=as_json, output=output, fields=sampling)
        )


def read_prompts(prompts: str | None, verbatim: tuple[str, ...]) -> list[str]:
    """The prompts of --prompts, split at |, then those of -p; "-" is all of stdin without its last line break."""
    texts = [text.strip() for text in prompts.split("|")] if prompts is not None else []
    for text in verbatim:
        texts.append(sys.stdin.read().removesuffix("\n") if text == "-" else text)
    return [text for text in texts if text]


def _check_source(texts: list[str], file: str | None, batch: str | None) -> None:
    """Prompts come from one place. Raises click.UsageError."""
    given = [name for name, value in (("--prompts or -p", texts), ("--file", file), ("--batch", batch)) if value]
    if not given:
        raise click.UsageError(
            'nothing to complete; add --prompts "first | second", -p - (which reads stdin), --file or --batch.'
        )
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} cannot be combined; give one of them.")


def _check_options(
    file: str | None,
    batch: str | None,
    output: Path | None,
    *,
    separator: str | None,
    resume: bool,
    chat: bool,
    as_json: bool,
) -> None:
    """No option is without effect. Raises click.UsageError."""
    if separator is not None and file is None:
        raise click.UsageError("--separator needs --file.")
    if output is not None and file is None and batch is None:
        raise click.UsageError("--output needs --file or --batch; redirect stdout instead.")
    if resume and (batch is None or output is None):
        raise click.UsageError("--resume needs --batch and --output.")
    if batch is not None and (chat or as_json):
        name = "--chat" if chat else "--json"
        raise click.UsageError(f"{name} has no meaning with --batch, whose lines are JSON and say what they are.")


def _report(tally: Tally) -> None:
    """Say that something failed: what is wrong with each is in the output. Raises ConfigError for status 1."""
    if tally.num_failed:
        raise ConfigError(f"{tally.text}; the output says why for each of them")


def _complete_texts(
    config: EngineConfig, texts: list[str], sampling: dict[str, Any], *, chat: bool, as_json: bool
) -> None:
    from pagewick.llm import LLM

    with LLM(config=config) as llm:
        params = replace(llm.get_default_sampling_params(), **sampling)
        if len(texts) == 1 and not as_json and params.n == 1:
            _stream_answer(llm, texts[0], params, chat=chat)
            return
        outputs = answer(llm, texts, params, chat=chat)
    for line in format_answers(texts, outputs, as_json=as_json):
        click.echo(shown_on(sys.stdout, line))


def answer(llm: LLM, texts: list[str], params: SamplingParams, *, chat: bool) -> list[RequestOutput]:
    """All in one batch; with a progress bar where somebody looks at stderr."""
    use_tqdm = sys.stderr.isatty() and len(texts) > 1
    if chat:
        return llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=use_tqdm)
    return llm.generate(texts, params, use_tqdm=use_tqdm)


def format_answers(texts: list[str], outputs: list[RequestOutput], *, as_json: bool) -> Iterator[str]:
    """The lines to print: one JSON object per answer, or each prompt's answers below it."""
    for text, output in zip(texts, outputs, strict=True):
        if not as_json:
            yield "\n".join([f"> {text}", *(choice.text.strip() for choice in output.outputs), ""])
            continue
        for choice in output.outputs:
            record: dict[str, Any] = {"prompt": text, "text": choice.text, "finish_reason": choice.finish_reason}
            record |= {"reasoning": choice.reasoning} if choice.reasoning else {}
            record |= {"index": choice.index} if len(output.outputs) > 1 else {}
            record |= {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(choice.token_ids)}
            yield json.dumps(record, ensure_ascii=False)


def _stream_answer(llm: LLM, text: str, params: SamplingParams, *, chat: bool) -> None:
    for piece in llm.stream([{"role": "user", "content": text}] if chat else text, params):
        click.echo(shown_on(sys.stdout, piece), nl=False)
    click.echo()
