"""The Python interface of vllm.rs on Pagewick's engine: its scripts run after a change of the import line.

from pagewick.vllm_rs import Engine, EngineConfig, Message, SamplingParams

engine = Engine(EngineConfig(model_path="Qwen/Qwen3-0.6B", max_model_len=4096), "bf16")
params = SamplingParams(temperature=0.6, max_tokens=256)
prompt = engine.apply_chat_template([Message("user", "How are you?")], True)
outputs = engine.generate_sync([params, params], [prompt, prompt])
seq_id, prompt_length, stream = engine.generate_stream(params, prompt)
for item in stream:
    print(item.data)
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pagewick import config as pagewick_config
from pagewick import sampling_params as pagewick_sampling
from pagewick.engine.messages import RequestOptions
from pagewick.errors import EngineError, InvalidRequestError
from pagewick.llm import LLM
from pagewick.log import get_logger
from pagewick.outputs import RequestOutput

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(slots=True)
class SamplingParams:
    """vllm.rs's sampling parameters; None: the model's recommendation.

    session_id: names a conversation; its part of the prefix cache is kept for its next request.
    """

    temperature: float | None = None
    max_tokens: int = 4096
    ignore_eos: bool = False
    top_k: int | None = None
    top_p: float | None = None
    session_id: str | None = None

    def apply_to(self, default: pagewick_sampling.SamplingParams, room: int) -> pagewick_sampling.SamplingParams:
        """Change `default` by the values that are set. `room`: tokens left in the context, the limit of max_tokens.

        Raises InvalidRequestError for a value out of range.
        """
        names = ("temperature", "ignore_eos", "top_k", "top_p")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(default, max_tokens=max(1, min(self.max_tokens, room)), **changes)


AnySamplingParams = SamplingParams | pagewick_sampling.SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The response to one prompt. Times are milliseconds since 1970; lengths are in tokens."""

    seq_id: int
    prompt_length: int
    prompt_start_time: int
    decode_start_time: int
    decode_finish_time: int
    decoded_length: int
    decode_output: str


@dataclass(frozen=True, slots=True)
class StreamItem:
    """A piece of a response: datatype "TOKEN" with the text in `data`, or "ERROR" with the reason."""

    datatype: Literal["TOKEN", "ERROR"]
    data: str

    def __str__(self) -> str:
        return self.data


class TokenStream:
    """An iterator over the pieces of one response; `cancel` ends it."""

    def __init__(self, pieces: Generator[str]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamItem:
        try:
            return StreamItem("TOKEN", next(self._pieces))
        except EngineError as error:
            return StreamItem("ERROR", str(error))

    def cancel(self) -> None:
        self._pieces.close()


def EngineConfig(
    model_path: str | None = None, *, device_ids: Sequence[int] | None = None, **options: Any
) -> pagewick_config.EngineConfig:
    """Make an EngineConfig from vllm.rs's names: model_path, weight_path, max_num_seqs, kvcache_mem_gpu, ...

    device_ids: one rank is started for each id. Raises ConfigError.
    """
    if model_path is not None:
        options["model"] = model_path
    if device_ids is not None:
        options["tensor_parallel_size"] = len(device_ids)
    return pagewick_config.EngineConfig.from_options(**options)


class Engine:
    """A model in this process; dtype is bf16, f16, f32 or None for the checkpoint's own."""

    def __init__(self, config: pagewick_config.EngineConfig, dtype: str | None = None) -> None:
        if dtype is not None:
            config = replace(config, dtype=dtype)
        self._llm = LLM(config=config)
        self._num_streams = 0

    def apply_chat_template(self, messages: Sequence[Message], log: bool = False) -> str:
        """Render the prompt for a conversation; `log` also logs it."""
        prompt = self._llm.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages]
        )
        if log:
            logger.info("prompt: %s", prompt)
        return prompt

    def generate_sync(
        self, params: AnySamplingParams | Sequence[AnySamplingParams], prompts: Sequence[str]
    ) -> list[GenerationOutput]:
        """Complete all prompts in one batch, with one SamplingParams for all or one for each.

        Raises InvalidRequestError, EngineError.
        """
        all_params = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(all_params) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts and {len(all_params)} SamplingParams")
        encoded = [self._encode(prompt) for prompt in prompts]
        stopwatch = _Stopwatch()
        outputs = self._llm.generate(
            encoded,
            [self._params(one, prompt) for one, prompt in zip(all_params, encoded, strict=True)],
            options=[_options(one) for one in all_params],
            on_step=stopwatch.on_step,
        )
        return [stopwatch.result(seq_id, output) for seq_id, output in enumerate(outputs)]

    def generate_stream(self, params: AnySamplingParams, prompt: str) -> tuple[int, int, TokenStream]:
        """Return a sequence id, the prompt's length in tokens, and a stream of the response."""
        encoded = self._encode(prompt)
        pieces = self._llm.stream(encoded, self._params(params, encoded), options=_options(params))
        self._num_streams += 1
        return self._num_streams - 1, len(encoded), TokenStream(pieces)

    def _params(self, params: AnySamplingParams, prompt: Sequence[int]) -> pagewick_sampling.SamplingParams:
        if isinstance(params, pagewick_sampling.SamplingParams):
            return params
        room = self._llm.info.max_model_len - len(prompt)
        return params.apply_to(self._llm.get_default_sampling_params(), room)

    def _encode(self, prompt: str) -> list[int]:
        """Encode a prompt, whose beginning-of-sequence token the chat template may have written."""
        tokenizer = self._llm.get_tokenizer()
        has_begin = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return tokenizer.encode(prompt, add_special_tokens=not has_begin, max_len=self._llm.info.max_model_len)


def _options(params: AnySamplingParams) -> RequestOptions:
    return RequestOptions(session_id=params.session_id if isinstance(params, SamplingParams) else None)


class _Stopwatch:
    """Records when each prompt got its first and its last token, in milliseconds since 1970."""

    def __init__(self) -> None:
        self.start = _milliseconds()
        self.first: dict[str, int] = {}
        self.finish: dict[str, int] = {}

    def on_step(self, outputs: Sequence[RequestOutput]) -> None:
        now = _milliseconds()
        for output in outputs:
            if output.outputs[0].token_ids:
                self.first.setdefault(output.request_id, now)
            if output.finished:
                self.finish.setdefault(output.request_id, now)

    def result(self, seq_id: int, output: RequestOutput) -> GenerationOutput:
        return GenerationOutput(
            seq_id=seq_id,
            prompt_length=len(output.prompt_token_ids),
            prompt_start_time=self.start,
            decode_start_time=self.first[output.request_id],
            decode_finish_time=self.finish[output.request_id],
            decoded_length=len(output.outputs[0].token_ids),
            decode_output=output.outputs[0].text,
        )


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000
