"""AsyncEngine: text in, text out, for many users at once. The model runs in a process of its own.

    engine = await AsyncEngine.start(EngineConfig(model="Qwen/Qwen3-0.6B"))
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
    await engine.close()

Imports no torch.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request
from pagewick.engine.client import EngineClient
from pagewick.engine.messages import EngineStats, ModelInfo, RequestOptions
from pagewick.errors import EngineDeadError, InvalidRequestError
from pagewick.generation import Client, Generation, OnDelta
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams, default_sampling_params
from pagewick.text.chat_template import RESERVED_VARIABLES, ChatTemplate, Message
from pagewick.text.request_stream import RequestStream, engine_request
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer, read_json_object
from pagewick.weights.hub import resolve_model

SEED_BITS = 63
# Templates and tokenizers run beside the event loop; both leave the interpreter lock for the long part.
NUM_TEXT_THREADS = 2

_Result = TypeVar("_Result")


class AsyncEngine:
    """An engine process with its tokenizer and chat template. Made by `start`."""

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        default_params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> None:
        self._client = client
        self.tokenizer = tokenizer
        self._strings = TokenStrings(tokenizer, client.info.vocab_size)
        self._chat_template = chat_template
        self.default_params = default_params or SamplingParams()
        self._seeds = random.Random(seed)
        self._generations: dict[str, Generation] = {}
        self._text_threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text")

    @classmethod
    async def start(cls, config: EngineConfig) -> Self:
        """Get the model, start its engine process and wait until it is ready.

        Raises ConfigError, ModelLoadError, or EngineDeadError if the process dies.
        """
        config = await asyncio.to_thread(with_local_models, config)
        tokenizer, chat_template, default_params = await asyncio.to_thread(_load_text, Path(config.model))
        client = await EngineClient.start(config)
        return cls(client, tokenizer, chat_template, default_params=default_params, seed=config.seed)

    @property
    def info(self) -> ModelInfo:
        """What the engine loaded and decided."""
        return self._client.info

    @property
    def stats(self) -> EngineStats:
        """The latest counts that the engine sent."""
        return self._client.stats

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    async def encode(self, prompt: str) -> list[int]:
        """The token ids of a prompt, with the special tokens that the model expects around it."""
        encode = partial(self.tokenizer.encode, add_special_tokens=True, max_len=self.info.max_model_len)
        return await self._in_thread(partial(encode, prompt))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation. messages and tools are OpenAI's, as plain data.

        Raises InvalidRequestError if the model has no chat template or its template rejects them.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions, or a chat model", param="messages"
            )
        variables = chat_template_kwargs or {}
        if wrong := sorted(RESERVED_VARIABLES & variables.keys()):
            raise InvalidRequestError(f"chat_template_kwargs must not set {wrong[0]}", param="chat_template_kwargs")
        render = partial(self._chat_template.render, messages, tools, add_generation_prompt, **variables)
        encode = partial(self.tokenizer.encode_pieces, max_len=self.info.max_model_len)
        return await self._in_thread(lambda: encode(render().pieces))

    async def prepare(self, params: SamplingParams) -> None:
        """Look up beside the event loop what `request` would look up in it: DRY's first breakers take a while.

        Raises InvalidRequestError as `request` does.
        """
        if params.dry_multiplier > 0:
            await self._in_thread(partial(self._strings.dry_breaker_ids, params))

    def request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        on_delta: OnDelta | None = None,
    ) -> Generation:
        """A checked request, ready to start; the engine hears of it when the Generation is entered.

        request_id: must be unique among the requests in flight; a name of its own is found if there is none.
        on_delta: called with every delta at once, and with a last one for each choice that was left unfinished.
        Raises InvalidRequestError, ContextLengthError if it can never be served, EngineDeadError.
        """
        if not self.is_alive:
            raise EngineDeadError("the engine is not running; restart the server")
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._generations:
            raise InvalidRequestError(f"a request {request_id} is already running", param="request_id")
        seed = self._seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed
        request = engine_request(
            request_id, prompt_token_ids, params, seed=seed, options=options, strings=self._strings
        )
        check_request(request, self.info)
        stream = RequestStream(self.tokenizer, request, params, prompt)
        return Generation(self._client, request, stream, self._generations, on_delta)

    async def generate(
        self,
        prompt: str | list[int] | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """What has come of the request so far, again and again until it is finished.

        prompt: a text, token ids, or a conversation's messages. sampling_params: None is what the model recommends.
        options: its priority, its session and the like. With best_of there is nothing to see before the end.
        Closing the iterator aborts the request. Every step yields the same RequestOutput, grown.
        Raises as `request` does, and EngineError if the engine fails it: QueueFullError, DeadlineExceededError.
        """
        text = prompt if isinstance(prompt, str) else None
        token_ids = await self._encode_any(prompt)
        params = sampling_params or self.default_params
        await self.prepare(params)
        async with self.request(token_ids, params, prompt=text, request_id=request_id, options=options) as generation:
            async for _ in generation:
                yield generation.output

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish_reason "abort". An unknown id is ignored."""
        if request_id in self._generations:
            await self._client.abort([request_id])

    async def close(self) -> None:
        """End the engine process. Requests in flight get an EngineDeadError."""
        for generation in self._generations.values():
            generation.fail(EngineDeadError("the server is shutting down"))
        await self._client.close()
        self._text_threads.shutdown(wait=False, cancel_futures=True)

    async def _encode_any(self, prompt: str | list[int] | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return await self.encode(prompt)
        if all(isinstance(item, int) for item in prompt):
            return [item for item in prompt if isinstance(item, int)]
        return await self.encode_chat([item for item in prompt if isinstance(item, Mapping)])

    async def _in_thread(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, function)


def with_local_models(config: EngineConfig) -> EngineConfig:
    """The config with a directory for every model that it names; what is not on this disk is downloaded.

    Raises ModelLoadError, ConfigError.
    """
    config = replace(config, model=str(resolve_model(config.model, revision=config.revision)))
    if config.speculative_model is None:
        return config
    return replace(config, speculative_model=str(resolve_model(config.speculative_model)))


def _load_text(path: Path) -> tuple[Tokenizer, ChatTemplate | None, SamplingParams]:
    """The tokenizer, the chat template and the sampling that generation_config.json recommends."""
    tokenizer = Tokenizer.from_directory(path)
    generation_config = read_json_object(path / "generation_config.json")
    default_params = default_sampling_params(generation_config)
    return tokenizer, ChatTemplate.from_directory(path, tokenizer), default_params
