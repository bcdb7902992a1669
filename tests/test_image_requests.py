"""Images on their way from a conversation or a prompt to the engine, in LLM and AsyncEngine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagewick.engine.engine
from pagewick.api_arguments import image_reader
from pagewick.config import EngineConfig
from pagewick.engine.messages import Add, EngineRequest, ImageInput, RequestOptions, decode_to_engine, encode_frame
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import ArgumentError, ContextLengthError, InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.images.sources import LoadedImage
from pagewick.llm import LLM
from pagewick.sampling_params import SamplingParams
from pagewick.text.image_prompts import ModelInput
from pagewick.text_threads import TextThreads
from tests.fake_engine import MAX_MODEL_LEN, FakeClient, fake_engine
from tests.images.pictures import file_of, noise, prepare
from tests.images.reading_model import (
    FILES,
    NUM_TOKENS,
    PAD,
    PAD_ID,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    expanded,
    image_part,
    reader,
    reading_encoder,
    reading_engine,
    user,
    write_settings,
)
from tests.scripted_engine import ScriptedEngine
from tests.tiny_text import byte_level_backend, write_model_directory

CONVERSATION = [user("What is ", image_part(0), "?", image_part(2))]
WANTED = reading_encoder().place_chat(CONVERSATION).token_ids


def pixels(number: int) -> bytes:
    return prepare(FILES[number], SETTINGS).pixels.tobytes()


def check_conversation(request: EngineRequest) -> None:
    assert request.prompt_token_ids == WANTED
    places = [(one.start, one.num_tokens, one.height, one.width) for one in request.images]
    first = WANTED.index(PAD_ID)
    assert places == [(first, 6, 12, 18), (WANTED.index(PAD_ID, first + 6), 5, 30, 6)]
    assert [one.pixels for one in request.images] == [pixels(0), pixels(2)]


async def request_of(prompt: Any, **options: Any) -> EngineRequest:
    client = FakeClient()
    async for _ in reading_engine(client).generate(prompt, **options):
        pass
    return client.requests[-1]


def test_an_async_engine_reads_images_of_conversations() -> None:
    check_conversation(asyncio.run(request_of(CONVERSATION)))
    assert asyncio.run(request_of([user("a")])).images == []


def test_images_cross_the_process_border() -> None:
    request = asyncio.run(request_of(CONVERSATION))
    decoded = decode_to_engine(encode_frame(Add([request]))[4:])
    assert isinstance(decoded, Add)
    check_conversation(decoded.requests[0])


@pytest.mark.parametrize("prompt", [f"{PAD}, {PAD}.", TOKENIZER.encode(f"{PAD}, {PAD}.", add_special_tokens=False)])
def test_an_async_engine_reads_images_of_prompts(prompt: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.jpg"
    path.write_bytes(FILES[2])
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    request = asyncio.run(request_of({name: prompt, "multi_modal_data": {"image": [noise(12, 18), str(path)]}}))
    assert request.prompt_token_ids == expanded(f"{PAD}, {PAD}.", 0, 2)
    assert [one.pixels for one in request.images] == [np.asarray(noise(12, 18)).tobytes(), pixels(2)]


def test_embeddings_of_images_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(UnsupportedError, match="made of texts only"):
            await reading_engine(FakeClient()).embed({"prompt": PAD, "multi_modal_data": {"image": FILES[0]}})

    asyncio.run(main())


def test_images_are_counted_without_being_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(LoadedImage, "pictures", fail)
    too_large = [user({"type": "image", "image": file_of(noise(90, 80))}, *[image_part(0)] * 60)]

    async def main() -> None:
        engine = reading_engine(FakeClient())
        assert await engine.encode_chat(CONVERSATION) == WANTED
        assert (await engine.render_chat(CONVERSATION)).count(PAD) == 2
        with pytest.raises(ContextLengthError, match=f"length is {MAX_MODEL_LEN} tokens. The images alone have 555"):
            await engine.chat_input(too_large)
        with pytest.raises(ContextLengthError, match="in the prompt with its images"):
            await engine.chat_input(CONVERSATION, num_output_tokens=MAX_MODEL_LEN - 10)

    asyncio.run(main())


def test_images_are_decoded_beside_the_event_loop_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, both, names = threading.Lock(), threading.Event(), []
    num_running, most = 0, 0
    original = LoadedImage.pictures

    def pictures(self: LoadedImage, settings: Any) -> Any:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
            names.append(threading.current_thread().name)
            if num_running == 2:
                both.set()
        both.wait(20)
        with lock:
            num_running -= 1
        return original(self, settings)

    monkeypatch.setattr(LoadedImage, "pictures", pictures)

    async def main() -> None:
        engine = reading_engine(FakeClient())
        found = await asyncio.gather(*(engine.chat_input(CONVERSATION) for _ in range(5)))
        assert all(one.token_ids == WANTED and len(one.images) == 2 for one in found)

    asyncio.run(main())
    assert most == 2 and len(names) == 10
    assert all(name.startswith("images") for name in names)


def test_a_damaged_image_fails_its_request_alone() -> None:
    damaged = [user({"type": "image", "image": FILES[0][:300]})]

    async def main() -> None:
        engine = reading_engine(FakeClient())
        whole, failed = await asyncio.gather(
            engine.chat_input(CONVERSATION), engine.chat_input(damaged), return_exceptions=True
        )
        assert isinstance(whole, ModelInput) and whole.token_ids == WANTED
        assert isinstance(failed, InvalidRequestError) and "image 1 of the request" in str(failed)

    asyncio.run(main())


def test_short_prompts_are_for_people() -> None:
    found = asyncio.run(reading_engine(FakeClient()).chat_input(CONVERSATION))
    text = reading_encoder().render_chat(CONVERSATION).text
    assert TOKENIZER.decode(found.short_token_ids, skip_special_tokens=False) == text
    assert ModelInput([1, 2]).short_token_ids == [1, 2]
    image = ImageInput(0, 3, 6, 18, b"")
    assert ModelInput([7, 7, 7], [image]).short_token_ids == [7]


def test_threads_end() -> None:
    async def main() -> None:
        threads = TextThreads()
        assert await threads.run(lambda: threading.current_thread().name.startswith("images"), is_image=True)
        threads.close()

    asyncio.run(main())


def test_settings_are_read_only_for_models_that_read_images(tmp_path: Path) -> None:
    config, info = EngineConfig(model=str(tmp_path)), FakeClient().info
    assert image_reader(config, info, TOKENIZER) is None
    info.image_token_id = PAD_ID
    with pytest.raises(ModelLoadError, match=r"preprocessor_config\.json"):
        image_reader(config, info, TOKENIZER)
    write_settings(tmp_path)
    found = image_reader(config, info, TOKENIZER)
    assert found is not None
    (placed,) = found.loaded([FILES[2]], max_len=100, param="messages")
    assert placed.num_tokens == NUM_TOKENS[2]
    with pytest.raises(InvalidRequestError, match=r"0 places for images .<\|image_pad\|>."):
        found.placed([1], [placed], max_len=100, num_output_tokens=1, param="messages")


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, list[EngineRequest]]:
    """An LLM whose engine answers at once and notes its requests."""
    requests: list[EngineRequest] = []
    backend = byte_level_backend()
    backend.add_special_tokens(["<|vision_start|>", PAD, "<|vision_end|>"])
    write_model_directory(tmp_path, backend, chat_template=TEMPLATE)
    end = TOKENIZER.eos_token_ids[0]

    def answer(request: EngineRequest) -> list[int]:
        requests.append(request)
        return [end]

    def engine(config: EngineConfig, **_: Any) -> ScriptedEngine:
        made = ScriptedEngine(config, script=answer, vocab_size=TOKENIZER.vocab_size, eos_token_id=end)
        made.info.image_token_id, made.info.image_side = PAD_ID, SETTINGS.token_side
        return made

    def read(config: EngineConfig, info: ModelInfo, tokenizer: Any) -> Any:
        assert config.model == str(tmp_path)
        return reader()

    monkeypatch.setattr(pagewick.engine.engine, "Engine", engine)
    monkeypatch.setattr("pagewick.llm.image_reader", read)
    return LLM(str(tmp_path)), requests


def test_llm_reads_images_of_conversations(llm: tuple[LLM, list[EngineRequest]], tmp_path: Path) -> None:
    model, requests = llm
    path = tmp_path / "one.png"
    path.write_bytes(FILES[0])
    from_a_path = [user("What is ", {"type": "image", "image": str(path)}, "?", image_part(2))]
    outputs = model.chat([CONVERSATION, from_a_path])
    assert len(requests) == len(outputs) == 2
    for request, output in zip(requests, outputs, strict=True):
        check_conversation(request)
        assert output.prompt is not None and output.prompt.count(PAD) == 2
        assert output.prompt_token_ids == WANTED
    (streamed,) = list(model.stream_outputs(CONVERSATION))[-1:]
    assert streamed.prompt_token_ids == WANTED
    check_conversation(requests[2])
    assert model.apply_chat_template(CONVERSATION) == outputs[0].prompt


Call = Callable[[LLM], Any]


def test_llm_reads_images_of_prompts(llm: tuple[LLM, list[EngineRequest]]) -> None:
    model, requests = llm
    one = {"prompt": f"{PAD}?", "multi_modal_data": {"image": FILES[1], "video": None}}
    two = {"prompt": f"{PAD}{PAD}", "multi_modal_data": {"image": [FILES[0], FILES[2]]}}
    model.generate([one, "a", two, {"prompt": "b", "multi_modal_data": {"image": []}}])
    assert [[image.pixels for image in request.images] for request in requests] == [
        [pixels(1)], [], [pixels(0), pixels(2)], [],
    ]  # fmt: skip
    assert requests[2].prompt_token_ids == expanded(f"{PAD}{PAD}", 0, 2)
    (streamed,) = list(model.stream_outputs(one))[-1:]
    assert streamed.prompt_token_ids == expanded(f"{PAD}?", 1)


@pytest.mark.parametrize(
    ("prompt", "kind", "reason"),
    [
        ({"prompt": PAD, "multi_modal_data": {"video": b"x"}}, UnsupportedError, "has 'video'; .* images only"),
        ({"prompt": PAD, "multi_modal_data": [FILES[0]]}, ArgumentError, "must be a dict"),
        ({"prompt": PAD, "multi_modal_data": {"image": 3}}, ArgumentError, "an image must be a path"),
        ({"prompt": PAD, "multi_modal_data": {"image": "http://x/y"}}, UnsupportedError, "not fetched"),
        ({"prompt": PAD, "multi_modal_data": {"image": "no.png"}}, InvalidRequestError, "image 1 .*cannot be read"),
        ({"prompt": "a", "multi_modal_data": {"image": FILES[0]}}, InvalidRequestError, "0 places"),
        ({"prompt": PAD, "multi_modal_uuids": {"image": "x"}}, ArgumentError, "knows an image by its pixels"),
        ({"multi_modal_data": {"image": FILES[0]}}, ArgumentError, "needs prompt or prompt_token_ids"),
    ],
)
def test_wrong_images_of_prompts(
    llm: tuple[LLM, list[EngineRequest]], prompt: Any, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        llm[0].generate(prompt)
    assert not llm[1]


def test_llm_makes_no_embeddings_of_images(llm: tuple[LLM, list[EngineRequest]]) -> None:
    with pytest.raises(UnsupportedError, match="made of texts only"):
        llm[0].embed(["a", {"prompt": PAD, "multi_modal_data": {"image": FILES[0]}}])


def test_a_model_that_reads_text_refuses_images() -> None:
    async def main() -> None:
        engine = fake_engine(FakeClient())
        with pytest.raises(UnsupportedError, match="reads text only; a content part has type 'image_url'"):
            await engine.chat_input(CONVERSATION)
        with pytest.raises(UnsupportedError, match="reads no images"):
            await engine.prompt_input("a", [FILES[0]])
        plan = await engine.prepare(SamplingParams(), options=RequestOptions())
        assert engine.generation([1], plan).output.prompt_token_ids == [1]

    asyncio.run(main())
