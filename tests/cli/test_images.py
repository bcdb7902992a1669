"""Images in `pagewick complete` and `pagewick chat`, on a stand-in for LLM."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli, image_file
from pagewick.cli.chatting.commands import Commands, completions
from pagewick.cli.chatting.conversation import Conversation
from pagewick.cli.chatting.local_model import LocalModel
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError, ContextLengthError
from tests.cli.fake_llm import FakeLLM

FILES = {
    "a.png": (b"\x89PNG\r\n\x1a\nrest", "png"),
    "b.jpg": (b"\xff\xd8\xff\xe0rest", "jpeg"),
    "c.webp": (b"RIFF\1\2\3\4WEBPrest", "webp"),
    "d.gif": (b"GIF89arest", "gif"),
    "d.bmp": (b"BMrest", "bmp"),
    # The beginning of a file counts, and not its name.
    "e.png": (b"\xff\xd8\xffrest", "jpeg"),
}
TEXT = {"type": "text", "text": "what?"}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write image files to the current directory; returns the part of a message for each."""
    monkeypatch.chdir(tmp_path)
    parts = {}
    for name, (data, kind) in FILES.items():
        Path(name).write_bytes(data)
        url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        parts[name] = {"type": "image_url", "image_url": {"url": url}}
    return parts


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, [*arguments], input=stdin, prog_name="pagewick")


def test_images_go_with_each_prompt_as_a_chat(opened: list[FakeLLM], images: dict[str, Any]) -> None:
    arguments = [part for name in FILES for part in ("--image", name)]
    result = run("complete", *arguments, "-p", "what?")
    assert (result.exit_code, result.stdout) == (0, "******WHAT?\n"), result.output
    assert opened[0].calls[0][:2] == ("stream", [{"role": "user", "content": [*images.values(), TEXT]}])
    result = run("complete", "--chat", "--image", "a.png", "-p", "what?", "-p", "who?")
    assert result.stdout == "> what?\n*WHAT?\n\n> who?\n*WHO?\n\n"
    contents = [messages[0]["content"] for messages in opened[1].calls[0][1]]
    assert contents == [[images["a.png"], TEXT], [images["a.png"], {**TEXT, "text": "who?"}]]
    (line,) = run("complete", "--image", "a.png", "-p", "what?", "--json").stdout.splitlines()
    assert json.loads(line)["prompt"] == "what?"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.png", "cannot read none.png: No such file or directory"),
        ("text.png", "text.png is not an image: it must be a file of the format PNG, JPEG, WebP, GIF or BMP"),
        ("empty.png", "empty.png is not an image"),
        ("large.png", "large.png is larger than 64 MiB; scale the image down first"),
        ("~no-such-user/x.png", "there is no such home directory"),
    ],
)
def test_what_is_no_image_is_said(opened: list[FakeLLM], images: object, name: str, words: str) -> None:
    Path("text.png").write_text("RIFF, a text")
    Path("empty.png").write_bytes(b"")
    with Path("large.png").open("wb") as file:
        file.truncate(image_file.MAX_BYTES + 1)
    result = run("complete", "--image", name, "-p", "x")
    assert (result.exit_code, opened) == (1, []) and words in result.stderr
    result = run("chat", stdin=f"/image {name}\nhello\n")
    assert (result.exit_code, result.stdout) == (1, "") and words in result.stderr


def test_an_image_needs_a_prompt_on_the_command_line(opened: list[FakeLLM], images: object) -> None:
    Path("lines").write_text("{}")
    for way, words in (("--file", "the prompts of --file have no images"), ("--batch", "the lines of --batch have")):
        result = run("complete", way, "lines", "--image", "a.png")
        assert result.exit_code == 2 and f"--image goes with --prompts or -p; {words}" in result.stderr
    assert run("complete", "--image", "a.png").exit_code == 2
    assert opened == []


def test_a_model_without_images_is_named_with_the_flag(
    opened: list[FakeLLM], images: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "info", SimpleNamespace(image_token_id=None))
    for flags, words in (
        (("some/model",), "some/model reads text only; leave out --image, or name a model that reads images"),
        (("--language-model-only",), "--language-model-only leaves out the part of the model that sees"),
    ):
        result = run("complete", *flags, "--image", "a.png", "-p", "x")
        assert (result.exit_code, result.stdout) == (1, "") and words in result.stderr
    assert run("complete", "--chat", "-p", "x").exit_code == 0


@pytest.fixture
def conversation(opened: list[FakeLLM], images: object) -> Conversation:
    llm = FakeLLM(config=EngineConfig())
    llm.max_chars = 2000
    return Conversation(LocalModel(llm, "fake"), ChatSettings(), None)  # type: ignore[arg-type]


def respond(conversation: Conversation, text: str) -> str:
    return "".join(piece.text for piece in conversation.say(text))


def test_an_image_goes_with_the_next_message(conversation: Conversation, images: dict[str, Any]) -> None:
    said: list[str] = []
    commands = Commands(conversation, said.append)
    assert commands.message_of("/image a.png") == commands.message_of("/image b.jpg") == ""
    assert said == ["1 image goes with the next message.", "2 images go with the next message."]
    assert respond(conversation, "what?") == "**WHAT?"
    assert respond(conversation, "and?") == "AND?"
    assert conversation.turns[0]["content"] == [images["a.png"], images["b.jpg"], TEXT]
    assert conversation.turns[2]["content"] == "and?"
    commands.message_of("/undo")
    assert commands.message_of("/retry") == "what?"
    assert respond(conversation, "what?") == "**WHAT?"
    commands.message_of("/undo")
    assert said[-1] == "Taken back: what?"
    assert respond(conversation, "what?") == "WHAT?"
    for line in ("/image c.webp", "/image -"):
        commands.message_of(line)
    assert said[-1] == "No image goes with the next message."
    commands.message_of("/image")
    assert said[-1] == "/image needs the name of a file: /image photo.jpg"
    commands.message_of("/image c.webp")
    commands.message_of("/reset")
    assert conversation.images == []


def test_a_message_that_fails_leaves_its_images_for_the_next(
    conversation: Conversation, images: dict[str, Any]
) -> None:
    conversation.images = [images["a.png"]]
    with pytest.raises(ContextLengthError):
        respond(conversation, "x" * 3000)
    assert (conversation.turns, conversation.images) == ([], [images["a.png"]])
    assert respond(conversation, "what?") == "*WHAT?"


def test_files_are_completed(images: object) -> None:
    assert completions("/image a", "a") == ["a.png"]


def test_conversations_are_saved_and_loaded_with_images(conversation: Conversation, images: dict[str, Any]) -> None:
    conversation.images = [images["a.png"]]
    respond(conversation, "what?")
    conversation.save(Path("talk.json"))
    conversation.save(Path("talk.md"))
    assert Path("talk.md").read_text() == "## You\n\n[image]\n\nwhat?\n\n## Model\n\n*WHAT?\n\n"
    turns = conversation.turns
    conversation.reset()
    conversation.load(Path("talk.json"))
    assert conversation.turns == turns
    assert turns[0]["content"] == [images["a.png"], TEXT]


@pytest.mark.parametrize(
    ("role", "content"),
    [
        ("user", []),
        ("user", [{"type": "image_url", "image_url": {"url": "https://e.org/x.png"}}, TEXT]),
        ("user", [{"type": "image_url", "image_url": "data:x"}, TEXT]),
        ("user", [{"type": "image", "image": "/etc/passwd"}, TEXT]),
        ("user", [TEXT, {"type": "image_url", "image_url": {"url": "data:x"}}]),
        ("user", [None, TEXT]),
        ("assistant", [TEXT]),
        ("user", None),
    ],
    ids=str,
)
def test_no_other_contents_are_loaded(conversation: Conversation, role: str, content: Any) -> None:
    Path("talk.json").write_text(json.dumps([{"role": "user", "content": "hi"}, {"role": role, "content": content}]))
    with pytest.raises(ConfigError, match="message 2 must have the role user or assistant and a text"):
        conversation.load(Path("talk.json"))
