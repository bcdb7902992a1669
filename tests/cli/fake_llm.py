"""FakeLLM: what the commands use of pagewick.llm.LLM, answering with the prompt in capitals."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

from pagewick.config import EngineConfig
from pagewick.errors import ContextLengthError
from pagewick.outputs import CompletionOutput, RequestOutput
from pagewick.sampling_params import SamplingParams


class FakeLLM:
    """opened: every instance. calls: (method, what was asked, params), also those of streams that were not read."""

    opened: list[FakeLLM]
    max_chars = 200

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

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=lambda text, add_special_tokens: list(text))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **template_kwargs: Any) -> str:
        """A template that opens the thoughts itself if it is told to think."""
        return "".join(message["content"] for message in messages) + self.think(template_kwargs)

    @staticmethod
    def think(template_kwargs: Mapping[str, Any]) -> str:
        return "<think>\n" if template_kwargs.get("enable_thinking") else ""

    def generate(self, prompts: list[str], params: SamplingParams, *, use_tqdm: bool) -> list[RequestOutput]:
        assert not use_tqdm, "nobody looks at stderr"
        self.calls.append(("generate", prompts, params))
        return [self._output(prompt, prompt, params.n) for prompt in prompts]

    def chat(
        self, conversations: list[list[dict[str, str]]], params: SamplingParams, *, use_tqdm: bool
    ) -> list[RequestOutput]:
        assert not use_tqdm, "nobody looks at stderr"
        self.calls.append(("chat", conversations, params))
        texts = [messages[-1]["content"] for messages in conversations]
        return [self._output(text, f"<{text}>", params.n) for text in texts]

    def stream(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        params: SamplingParams,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[str]:
        """In letters; after a "thought" in small letters if it is told to think."""
        messages = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        self.calls.append(("stream", messages, params))
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if sum(len(str(message)) for message in prompt) > self.max_chars:
            raise ContextLengthError("This model's maximum context length is 5 tokens.")
        thought = "hmm</think>\n\n" if self.think(chat_template_kwargs or {}) else ""
        return (char for char in thought + text.upper())

    def _output(self, text: str, prompt: str, n: int) -> RequestOutput:
        choices = [
            CompletionOutput(index, f" {text.upper()} ", [1] * len(text), finish_reason="stop") for index in range(n)
        ]
        return RequestOutput("0", prompt, [1, 2], choices, finished=True)
