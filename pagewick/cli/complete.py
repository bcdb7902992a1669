"""`pagewick complete`: prompts in, answers out, in one process and one batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import EngineCommand, Flag
from pagewick.config import EngineConfig

if TYPE_CHECKING:
    from pagewick.llm import LLM
    from pagewick.outputs import RequestOutput
    from pagewick.sampling_params import SamplingParams


@click.command(cls=EngineCommand, has_sampling=True)
@click.option("--prompts", cls=Flag, help="Prompts, separated by |.")
@click.option("-p", "--prompt", "prompt", multiple=True, help="One prompt as it is; - reads it from stdin.")
@click.option("--chat", cls=Flag, is_flag=True, help="Take each prompt as a user's message to a chat model.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per answer.")
def command(
    config: EngineConfig,
    prompts: str | None,
    prompt: tuple[str, ...],
    chat: bool,
    as_json: bool,
    sampling: dict[str, Any],
) -> None:
    """Complete prompts with MODEL (default: the built-in one) and print the answers in order.

    \b
    pagewick complete --chat --prompts "What is Pagewick? | How do I install it?"
    echo "Once upon a time" | pagewick complete -p - --max-tokens 40
    """
    texts = read_prompts(prompts, prompt)
    if not texts:
        raise click.UsageError('nothing to complete; add --prompts "first | second" or -p -, which reads stdin.')
    from pagewick.llm import LLM

    with LLM(config=config) as llm:
        params = replace(llm.get_default_sampling_params(), **sampling)
        if len(texts) == 1 and not as_json:
            _stream_answer(llm, texts[0], params, chat=chat)
            return
        outputs = answer(llm, texts, params, chat=chat)
    for line in format_answers(texts, outputs, as_json=as_json):
        click.echo(line)


def read_prompts(prompts: str | None, verbatim: tuple[str, ...]) -> list[str]:
    """The prompts of --prompts, split at |, then those of -p; "-" is all of stdin without its last line break."""
    texts = [text.strip() for text in prompts.split("|")] if prompts is not None else []
    for text in verbatim:
        texts.append(sys.stdin.read().removesuffix("\n") if text == "-" else text)
    return [text for text in texts if text]


def answer(llm: LLM, texts: list[str], params: SamplingParams, *, chat: bool) -> list[RequestOutput]:
    if chat:
        return llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return llm.generate(texts, params)


def format_answers(texts: list[str], outputs: list[RequestOutput], *, as_json: bool) -> Iterator[str]:
    """The lines to print: one JSON object per answer, or each answer below its prompt."""
    for text, output in zip(texts, outputs, strict=True):
        choice = output.outputs[0]
        if not as_json:
            yield f"> {text}\n{choice.text.strip()}\n"
            continue
        record = {
            "prompt": text,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(choice.token_ids),
        }
        yield json.dumps(record, ensure_ascii=False)


def _stream_answer(llm: LLM, text: str, params: SamplingParams, *, chat: bool) -> None:
    for piece in llm.stream([{"role": "user", "content": text}] if chat else text, params):
        click.echo(piece, nl=False)
    click.echo()
