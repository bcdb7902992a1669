"""FakeLLM: the part of pagewick.llm.LLM that commands use; it responds in capitals, with a star for each image."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

from pagewick.config import EngineConfig
from pagewick.engine.messages import RequestOptions
from pagewick.errors import ContextLengthError
from pagewick.outputs import CompletionOutput, PartDelta, PartKind, RequestOutput
from pagewick.sampling_params import SamplingParams


def text_of(content: Any) -> str:
    """Return the text of a message's content, with a star for each image."""
    parts = [content] if isinstance(content, str) else [part.get("text", "*") for part in content]
    return "".join(parts)


class FakeLLM:
    """opened: every instance. calls: (method, input, params), also those of streams that were not read."""

    opened: list[FakeLLM]
    max_chars = 200
    info = SimpleNamespace(image_token_id=3)

    def __init__(self, *, config: EngineConfig) -> None:
        self.config = config
        self.calls: list[tuple[str, Any, SamplingParams]] = []
        self.is_closed = False
        self.opened.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6, top_k=20)

    def generate(
        self, prompts: list[str], params: SamplingParams, *, use_tqdm: bool, options: RequestOptions
    ) -> list[RequestOutput]:
        assert not use_tqdm, "stderr is not a terminal"
        assert options.lowers_max_tokens
        self.calls.append(("generate", prompts, params))
        return [self._output(prompt, prompt, params.n) for prompt in prompts]

    def chat(
        self,
        conversations: list[list[dict[str, str]]],
        params: SamplingParams,
        *,
        use_tqdm: bool,
        options: RequestOptions,
    ) -> list[RequestOutput]:
        assert not use_tqdm, "stderr is not a terminal"
        assert options.lowers_max_tokens
        self.calls.append(("chat", conversations, params))
        texts = [text_of(messages[-1]["content"]) for messages in conversations]
        return [self._output(text, f"<{text}>", params.n) for text in texts]

    def stream(
        self, prompt: str | Sequence[Mapping[str, str]], params: SamplingParams, *, options: RequestOptions
    ) -> Generator[str]:
        assert options.lowers_max_tokens
        messages = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        self.calls.append(("stream", messages, params))
        text = prompt if isinstance(prompt, str) else text_of(prompt[-1]["content"])
        return (char.upper() for char in text)

    def stream_outputs(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams,
        *,
        options: RequestOptions,
        chat_template_kwargs: Mapping[str, Any],
    ) -> Generator[RequestOutput]:
        """Yield one letter as each token; if thinking is on, yield the thoughts "hmm" first."""
        assert options.lowers_max_tokens
        self.calls.append(("stream_outputs", [dict(message) for message in messages], params))
        if sum(len(str(message)) for message in messages) > self.max_chars:
            raise ContextLengthError("This model's maximum context length is 5 tokens.")
        choice = CompletionOutput(0)
        output = RequestOutput("0", None, [1, 2], [choice])

        def grow() -> Generator[RequestOutput]:
            for char in "hmm" if chat_template_kwargs.get("enable_thinking") else "":
                choice.add([PartDelta(PartKind.REASONING, char)])
                choice.token_ids.append(1)
                yield output
            for char in text_of(messages[-1]["content"]).upper():
                choice.add([PartDelta(PartKind.TEXT, char)])
                choice.token_ids.append(1)
                yield output
            choice.finish_reason = "stop"
            yield output

        return grow()

    def _output(self, text: str, prompt: str, n: int) -> RequestOutput:
        choices = [
            CompletionOutput(index, f" {text.upper()} ", [1] * len(text), finish_reason="stop") for index in range(n)
        ]
        return RequestOutput("0", prompt, [1, 2], choices, finished=True)
