"""A real server with LoRA adapters of the built-in model: the clients of OpenAI and Anthropic, and the Python APIs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from pagewick import LLM, AsyncEngine, LoRARequest, SamplingParams
from pagewick.cli import cli
from pagewick.demo import MODEL_DIR
from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from tests.models.lora_adapters import adapted, linear_names, write_adapter
from tests.server.test_serving import READY

PROMPT = "Which port does the server"
NUM_TOKENS = 12
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def answers(directory: Path) -> dict[str, list[int]]:
    """Write two adapters of the built-in model; returns the tokens that PEFT continues the prompt with, by adapter."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    names = linear_names(model)
    write_adapter(model, directory / "red", names, seed=1, rank=8, lora_alpha=4)
    write_adapter(model, directory / "blue", [one for one in names if one.endswith("q_proj")], seed=2, lora_alpha=90)
    with LLM(dtype="float32") as llm:
        prompt = llm.get_tokenizer().encode(PROMPT, add_special_tokens=True)
    found = {}
    for name in ("", "red", "blue"):
        with adapted(model, directory / name if name else None) as logits_of:
            token_ids = list(prompt)
            for _ in range(NUM_TOKENS):
                token_ids.append(int(logits_of(token_ids)[-1].argmax()))
        found[name] = token_ids[len(prompt) :]
    assert len({tuple(one) for one in found.values()}) == 3
    return found


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--dtype", "float32", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        try:
            yield next(match[1] for line in stdout if (match := READY.search(line))), process
        finally:
            process.terminate()
            status = process.wait(30)
    assert status == 0


@pytest.fixture(scope="module")
def address(directory: Path, answers: dict[str, list[int]]) -> Iterator[str]:
    adapters = [f"{name}={directory / name}" for name in ("red", "blue")]
    with serving("--lora-modules", *adapters, "--api-server-count", "2", "--served-model-name", "base") as (found, _):
        yield found


def complete(address: str, model: str) -> list[int]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=NUM_TOKENS, extra_body=extra
        )
        assert answer.model == model
        token_ids: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
        return token_ids


def test_a_request_names_its_adapter_as_the_model(address: str, answers: dict[str, list[int]]) -> None:
    for model in ("base", "red", "blue", "red"):
        assert complete(address, model) == answers[model.removeprefix("base")]


def test_the_models_are_listed(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        cards = {card.id: card for card in client.models.list()}
        assert set(cards) == {"base", "red", "blue"}
        assert [getattr(cards[name], "parent", "") for name in ("base", "red")] == [None, "base"]
        assert client.models.retrieve("blue").id == "blue"
        with pytest.raises(openai.NotFoundError, match="this server has 'base', 'red' and 'blue'"):
            complete(address, "green")


def test_other_apis_name_the_adapter_too(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        chats = {}
        for model in ("base", "blue"):
            chat = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=16)
            response = client.responses.create(model=model, input=PROMPT, temperature=0, max_output_tokens=16)
            with anthropic.Anthropic(base_url=address, api_key="none") as other:
                message = other.messages.create(
                    model=model, messages=MESSAGES, max_tokens=16, extra_body={"temperature": 0}
                )
            assert chat.model == response.model == message.model == model
            assert chat.choices[0].message.content == response.output_text == message.content[0].text  # type: ignore[union-attr]
            chats[model] = response.output_text
            (vector,) = client.embeddings.create(model=model, input=[PROMPT]).data
            chats[f"{model} embedding"] = str(vector.embedding)
        assert len(set(chats.values())) == 4
        chunks = client.chat.completions.create(
            model="blue", messages=MESSAGES, temperature=0, max_tokens=16, stream=True
        )
        assert {chunk.model for chunk in chunks} == {"blue"}


def test_adapters_cannot_be_loaded_unless_that_is_allowed(address: str, directory: Path) -> None:
    answer = httpx.post(f"{address}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(directory / "red")})
    assert answer.status_code == 404
    assert "start the server with --allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_adapters_are_loaded_and_unloaded_and_survive_the_engine(
    directory: Path, answers: dict[str, list[int]]
) -> None:
    with serving("--allow-runtime-lora-updating", "--served-model-name", "base", "--max-loras", "2") as (
        address,
        server,
    ):

        def post(route: str, **body: Any) -> httpx.Response:
            return httpx.post(f"{address}/v1/{route}_lora_adapter", json=body, timeout=60)

        def load(name: str, path: str, **more: Any) -> httpx.Response:
            return post("load", lora_name=name, lora_path=str(directory / path), **more)

        assert load("first", "red").json()["parent"] == "base"
        assert complete(address, "first") == answers["red"]
        taken = load("first", "blue")
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
        assert load("first", "blue", load_inplace=True).status_code == 200
        assert complete(address, "first") == answers["blue"]
        for body, complaint in (
            ({"name": "second", "path": "green"}, "there is no directory"),
            ({"name": "base", "path": "red"}, "which is a name of the model"),
            ({"name": "", "path": "red"}, "lora_name must be a text of 1 to 4096 characters"),
        ):
            refused = load(**body)
            assert refused.status_code in (400, 404) and complaint in refused.json()["error"]["message"]
        assert load("second", "red").status_code == 200
        full = load("third", "red")
        assert full.status_code == 400 and "room for 2 adapters" in full.json()["error"]["message"]

        # The engine dies; the next one has the adapters again.
        (engine,) = [
            one for one in psutil.Process(server.pid).children() if "pagewick.engine_process" in " ".join(one.cmdline())
        ]
        os.kill(engine.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while httpx.get(f"{address}/health", timeout=20).status_code != 200 or engine.is_running():
            assert time.monotonic() < deadline, "the engine does not come back"
            time.sleep(0.1)
        assert complete(address, "first") == answers["blue"] and complete(address, "second") == answers["red"]

        assert post("unload", lora_name="first").json() == {"id": "first", "object": "model", "deleted": True}
        assert post("unload", lora_name="first").status_code == 404
        with pytest.raises(openai.NotFoundError):
            complete(address, "first")
        assert complete(address, "base") == answers[""]


def test_llm_loads_adapters_when_they_are_named(directory: Path, answers: dict[str, list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    red, blue = (LoRARequest(name, 1, str(directory / name)) for name in ("red", "blue"))
    with LLM(dtype="float32", enable_lora=True, max_loras=1) as llm:
        for adapter, name in ((red, "red"), (blue, "blue"), (None, ""), (blue, "blue"), (red, "red")):
            (output,) = llm.generate(PROMPT, params, lora_request=adapter)
            assert output.outputs[0].token_ids == answers[name], name
        assert set(llm.info.adapters) == {"red"}
        (stream,) = [list(llm.stream(PROMPT, params, lora_request=LoRARequest("red")))]
        assert "".join(stream) == llm.get_tokenizer().decode(answers["red"], skip_special_tokens=True)
        with pytest.raises(InvalidRequestError, match="room for 1 adapters"):
            llm.generate([PROMPT] * 2, params, lora_request=[red, blue])
        with pytest.raises(InvalidRequestError, match="there is no adapter 'green': give its lora_path"):
            llm.generate(PROMPT, params, lora_request=LoRARequest("green"))
        with pytest.raises(ModelLoadError, match="there is no directory"):
            llm.generate(PROMPT, params, lora_request=LoRARequest("green", 3, str(directory / "green")))
        (other,) = llm.generate(PROMPT, params, lora_request=LoRARequest("red", 1, blue.lora_path))
        assert other.outputs[0].token_ids == answers["blue"]
    with LLM(dtype="float32", lora_modules={"red": red.lora_path, "blue": blue.lora_path}) as llm:
        wanted = [LoRARequest("red"), None, LoRARequest("blue")]
        outputs = llm.generate([PROMPT] * 3, params, lora_request=wanted)
        assert [one.outputs[0].token_ids for one in outputs] == [answers[name] for name in ("red", "", "blue")]
    with LLM(dtype="float32") as llm, pytest.raises(InvalidRequestError, match="LoRA adapters need --enable-lora"):
        llm.generate(PROMPT, params, lora_request=red)


def test_async_engine(directory: Path, answers: dict[str, list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    async def run() -> None:
        engine = await AsyncEngine.start(dtype="float32", enable_lora=True)
        try:
            for _ in range(2):
                red = LoRARequest("red", 1, str(directory / "red"))
                outputs = [one async for one in engine.generate(PROMPT, params, lora_request=red)]
                assert outputs[-1].outputs[0].token_ids == answers["red"]
            await engine.unload_adapter("red")
            with pytest.raises(InvalidRequestError, match="there is no adapter 'red'"):
                async for _ in engine.generate(PROMPT, params, lora_request=LoRARequest("red")):
                    pass
        finally:
            await engine.close()

    asyncio.run(run())


def test_commands_take_an_adapter(directory: Path, answers: dict[str, list[int]]) -> None:
    arguments = ["complete", "-p", PROMPT, "--temperature", "0", "--max-tokens", "6", "--dtype", "float32"]
    texts = {}
    for name in ("red", "blue"):
        result = CliRunner().invoke(cli, [*arguments, "--lora", str(directory / name)], prog_name="pagewick")
        assert result.exit_code == 0, result.output
        texts[name] = result.stdout
    assert texts["red"] != texts["blue"]
    wrong = CliRunner().invoke(cli, [*arguments, "--lora", str(directory)], prog_name="pagewick")
    assert wrong.exit_code and "holds no LoRA adapter" in wrong.output and wrong.output.count("\n") <= 6


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--lora-modules", "red"], "must be NAME=PATH, or an object with name and path; got 'red'"),
        (["--lora-modules", "a=b", "a=c"], "gives the name 'a' twice"),
        (["--lora-modules", "{"], "must be NAME=PATH or a JSON object; got '{'"),
        (["--lora-modules", "a=b", "c=d", "--max-loras", "1"], "is less than the number of adapters given, 2"),
        (["--lora-modules", "pagewick-demo=b"], "gives the name 'pagewick-demo', which is the model's"),
        (["--allow-runtime-lora-updating", "--api-server-count", "2"], "needs --api-server-count 1"),
    ],
)
def test_flags_that_contradict_themselves(flags: list[str], complaint: str) -> None:
    result = CliRunner().invoke(cli, ["serve", *flags], prog_name="pagewick")
    assert result.exit_code == 2 and complaint in result.output


def test_forms_of_adapters_in_a_config() -> None:
    from pagewick import EngineConfig

    expected = ("a=/x", "b=owner/name")
    for given in (
        {"a": "/x", "b": "owner/name"},
        ["a=/x", "b=owner/name"],
        ['{"name": "a", "path": "/x", "base_model_name": "m"}', {"name": "b", "path": "owner/name"}],
    ):
        config = EngineConfig.from_options(lora_modules=given)
        assert config.lora_modules == expected and config.enable_lora
    with pytest.raises(ConfigError, match=r"has unknown keys: scale; known: name, path, base_model_name"):
        EngineConfig.from_options(lora_modules={"name": "a", "path": "/x", "scale": 2})
