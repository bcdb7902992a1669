"""A chat in the terminal with an OpenAI-compatible server, which shows responses while they arrive.

pagewick serve --port 2000
python3 examples/chat.py --temperature 0.7 --top-k 64 --top-p 0.9 --thinking True
python3 examples/chat.py --live        # responses as Markdown

It needs openai and click, and rich for --live. `pagewick chat --url http://localhost:2000/v1` can do more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click
import openai


@click.command()
@click.option("--host", default="localhost", show_default=True)
@click.option("--port", default=2000, show_default=True)
@click.option("--model", help="Name of the model.  [default: the first one of the server]")
@click.option("--system-prompt", help="Message that begins the conversation.")
@click.option("--max-tokens", type=int, help="Longest response.  [default: the server's]")
@click.option("--temperature", type=float)
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--thinking", type=bool, help="Whether a reasoning model thinks before it answers.")
@click.option("--live", is_flag=True, help="Show responses as Markdown.")
def chat(host: str, port: int, model: str | None, system_prompt: str | None, live: bool, **fields: Any) -> None:
    """Talk to a model; an empty line or Ctrl-D ends the conversation."""
    try:
        with openai.OpenAI(base_url=f"http://{host}:{port}/v1/", api_key="EMPTY") as client:
            converse(client, model, system_prompt, live, fields)
    except openai.APIConnectionError:
        sys.exit(f"error: no server answers at {host}:{port}; start one, or give its --host and --port")
    except openai.APIError as error:
        sys.exit(f"error: {error.message}")


def converse(
    client: openai.OpenAI, model: str | None, system_prompt: str | None, live: bool, fields: dict[str, Any]
) -> None:
    """fields: options of requests; None leaves one to the server."""
    model = model or client.models.list().data[0].id
    given = {name: value for name, value in fields.items() if value is not None}
    # top_k and thinking are no fields of OpenAI's: the package sends them only as extra_body.
    extra = {name: given.pop(name) for name in ("top_k", "thinking") if name in given}
    messages: list[Any] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    while message := read_message():
        messages.append({"role": "user", "content": message})
        stream = client.chat.completions.create(model=model, messages=messages, stream=True, extra_body=extra, **given)
        messages.append({"role": "assistant", "content": show(pieces_of(stream), live)})


def read_message() -> str:
    """Return the next line of stdin; empty at its end."""
    if sys.stdin.isatty():
        print("🙋 ", end="", flush=True)
    return sys.stdin.readline().strip()


def pieces_of(stream: Iterable[Any]) -> Iterator[tuple[str, bool]]:
    """Yield pieces of text, and whether each is a thought, which is not part of the response."""
    for chunk in stream:
        delta = chunk.choices[0].delta if chunk.choices else None
        if thought := getattr(delta, "reasoning_content", None):
            yield thought, True
        if delta is not None and delta.content:
            yield delta.content, False


def show(pieces: Iterable[tuple[str, bool]], live: bool) -> str:
    """Print the pieces as they arrive, and return the response without its thoughts."""
    response = shown = ""
    if not live:
        for text, is_thought in pieces:
            print(text, end="", flush=True)
            response += "" if is_thought else text
        print("\n")
        return response
    from rich.live import Live
    from rich.markdown import Markdown

    with Live() as display:
        for text, is_thought in pieces:
            shown += text
            response += "" if is_thought else text
            display.update(Markdown(shown))
    return response


if __name__ == "__main__":
    chat()
