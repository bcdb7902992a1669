"""The Python interface of vllm.rs on Pagewick's engine: its scripts run after a change of the import line.

from pagewick.vllm_rs import Engine, EngineConfig, Message, SamplingParams

engine = Engine(EngineConfig(weight_path="Qwen/Qwen3-0.6B", max_model_len=4096), "bf16")
params = SamplingParams(temperature=0.6, max_tokens=256)
prompt = engine.apply_chat_template([Message("user", "How are you?")], True)
outputs = engine.generate_sync([params, params], [prompt, prompt])
seq_id, prompt_length, stream = engine.generate_stream(params, prompt)
for item in stream:
    print(item.data)

Its commands are here, too: python -m pagewick.vllm_rs.server, .chat and .completion, with vllm.rs's flags.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal, Self

from pagewick import config as pagewick_config
from pagewick import sampling_params as pagewick_sampling
from pagewick.engine.messages import RequestOptions
from pagewick.errors import ArgumentError, EngineError, InvalidRequestError
from pagewick.llm import LLM
from pagewick.log import get_logger
from pagewick.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 4096

# A step's token, or its tokens with draft tokens. It is here for annotations: no method returns one.
StepOutput = int | list[int]

logger = get_logger(__name__)


class DType(StrEnum):
    """The data types that an Engine takes."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(slots=True)
class GenerationConfig:
    """Defaults of an engine's requests; None: the model's recommendation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


@dataclass(slots=True)
class SamplingParams:
    """vllm.rs's sampling parameters; None: the engine's default.

    session_id: names a conversation; its part of the prefix cache is kept for its next request.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    top_k: int | None = None
    top_p: float | None = None
    session_id: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


AnySamplingParams = SamplingParams | pagewick_sampling.SamplingParams
Prompt = str | Sequence[Message]


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
    """A part of a response.

    data: for the datatype "TOKEN", new text; for "ERROR", the reason; for "DONE", the times of the prompt, of the first
    and of the last token as in GenerationOutput, and the number of tokens.
    """

    datatype: Literal["TOKEN", "ERROR", "DONE"]
    data: str | tuple[int, int, int, int]

    def __str__(self) -> str:
        return str(self.data)


class EngineStream:
    """An iterator over the items of one response; the last one is "DONE" or "ERROR"; `cancel` ends it."""

    def __init__(self, seq_id: int, prompt_length: int, outputs: Generator[RequestOutput]) -> None:
        self.seq_id = seq_id
        self.prompt_length = prompt_length
        self.finished = False
        self.cancelled = False
        self._outputs = outputs
        self._items = self._read()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamItem:
        return next(self._items)

    def cancel(self) -> None:
        self.cancelled = self.finished = True
        self._items.close()
        self._outputs.close()

    def _read(self) -> Generator[StreamItem]:
        stopwatch, num_chars = _Stopwatch(), 0
        try:
            with closing(self._outputs):
                for output in self._outputs:
                    stopwatch.on_step([output])
                    if text := output.outputs[0].text[num_chars:]:
                        num_chars += len(text)
                        yield StreamItem("TOKEN", text)
            result = stopwatch.result(self.seq_id, output)
            times = (result.prompt_start_time, result.decode_start_time, result.decode_finish_time)
            last = StreamItem("DONE", (*times, result.decoded_length))
        except EngineError as error:
            last = StreamItem("ERROR", str(error))
        self.finished = True
        yield last


class EngineConfig:
    """An engine's options, under vllm.rs's names (model_id, weight_path, num_shards, ...) or Pagewick's.

    device_ids: one rank is started for each of 0, 1, ...; a single one may be any device. generation_cfg, max_tokens:
    defaults of requests. Raises ConfigError for an option that is unknown or not supported.
    """

    def __init__(
        self,
        model_id: str | None = None,
        *,
        generation_cfg: GenerationConfig | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self.config = pagewick_config.EngineConfig.from_options(model_id=model_id, **options)
        self.generation_cfg = generation_cfg or GenerationConfig()
        self.max_tokens = max_tokens

    @property
    def sampling(self) -> dict[str, Any]:
        """The values that replace the model's defaults."""
        values = {**asdict(self.generation_cfg), "max_tokens": self.max_tokens}
        return {name: value for name, value in values.items() if value is not None}


class Engine:
    """A model in this process; dtype None is the checkpoint's own. Calls of several threads wait for each other."""

    def __init__(self, econfig: EngineConfig | pagewick_config.EngineConfig, dtype: DType | str | None = None) -> None:
        self.econfig = econfig
        config = econfig.config if isinstance(econfig, EngineConfig) else econfig
        self._sampling = econfig.sampling if isinstance(econfig, EngineConfig) else {}
        self._config = config if dtype is None else replace(config, dtype=str(dtype))
        self._llm = LLM(config=self._config)
        self._num_streams = 0

    def apply_chat_template(self, messages: Sequence[Message], log: bool = False) -> str:
        """Render the prompt for a conversation; `log` also logs it."""
        if not isinstance(messages, Sequence) or not all(isinstance(message, Message) for message in messages):
            raise ArgumentError(f"a conversation is a list of Message objects; got {repr(messages)[:80]}")
        prompt = self._llm.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages]
        )
        if log:
            logger.info("prompt: %s", prompt)
        return prompt

    def generate_sync(
        self, params: AnySamplingParams | Sequence[AnySamplingParams], prompts: Sequence[Prompt]
    ) -> list[GenerationOutput]:
        """Complete all prompts, or conversations, in one batch, with one SamplingParams for all or one for each.

        Raises InvalidRequestError, EngineError, and ArgumentError for what is no list of prompts.
        """
        if isinstance(prompts, str):
            raise ArgumentError("prompts must be a list; write [prompt] for a single one")
        all_params = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(all_params) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts and {len(all_params)} SamplingParams")
        encoded = [self._encode(prompt) for prompt in prompts]
        stopwatch = _Stopwatch()
        outputs = self._llm.generate(
            encoded,
            [self._params(one) for one in all_params],
            options=[_options(one) for one in all_params],
            on_step=stopwatch.on_step,
        )
        return [stopwatch.result(seq_id, output) for seq_id, output in enumerate(outputs)]

    def generate_stream(self, params: AnySamplingParams, prompt: Prompt) -> tuple[int, int, EngineStream]:
        """Return a sequence id, the prompt's length in tokens, and a stream of the response."""
        encoded = self._encode(prompt)
        outputs = self._llm.stream_outputs(encoded, self._params(params), options=_options(params))
        stream = EngineStream(self._num_streams, len(encoded), outputs)
        self._num_streams += 1
        return stream.seq_id, stream.prompt_length, stream

    def get_num_cached_tokens(self) -> int:
        """Return how many tokens the prefix cache holds."""
        return self._llm.get_stats().num_cached_blocks * self._llm.info.block_size

    def get_available_kv_tokens(self) -> int:
        """Return for how many tokens the KV cache has room, in blocks that no running sequence holds."""
        info = self._llm.info
        return (info.num_kv_blocks - self._llm.get_stats().num_referenced_blocks) * info.block_size

    def start_server(self, port: int = 8000, with_ui_server: bool = True) -> None:
        """Serve the model on this machine until Ctrl-C or SIGTERM, also with the chat page if with_ui_server is set.

        The server starts an engine of its own; this one is closed before. Raises what run_server raises.
        """
        from pagewick.server.run import run_server
        from pagewick.server.settings import ANY_NAME, ServerSettings

        self._llm.close()
        settings = ServerSettings.for_model(
            self._config.model, port=port, ui=with_ui_server, served_model_name=(ANY_NAME,)
        )
        run_server(self._config, settings, sampling=self._sampling)

    def _params(self, params: AnySamplingParams) -> pagewick_sampling.SamplingParams:
        if isinstance(params, pagewick_sampling.SamplingParams):
            return params
        given = {name: value for name, value in asdict(params).items() if value is not None and name != "session_id"}
        default = self._llm.get_default_sampling_params()
        return replace(default, **{"max_tokens": DEFAULT_MAX_TOKENS, **self._sampling, **given})

    def _encode(self, prompt: Prompt) -> list[int]:
        """Encode a prompt, whose beginning-of-sequence token the chat template may have written."""
        text = prompt if isinstance(prompt, str) else self.apply_chat_template(prompt)
        tokenizer = self._llm.get_tokenizer()
        has_begin = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return tokenizer.encode(text, add_special_tokens=not has_begin, max_len=self._llm.info.max_model_len)


def _options(params: AnySamplingParams) -> RequestOptions:
    if isinstance(params, SamplingParams):
        return RequestOptions(session_id=params.session_id, lowers_max_tokens=True)
    return RequestOptions()


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
