"""LocalModel: a model in this process."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from pagewick.cli.chatting.conversation import Message, Piece, ResponseEnd
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.config import EngineConfig
from pagewick.engine.messages import RequestOptions
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams, with_changes

if TYPE_CHECKING:
    from pagewick.llm import LLM


class LocalModel:
    """A ChatModel over LLM."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.name = name
        self.defaults: SamplingParams | None = llm.get_default_sampling_params()
        self.response_end = ResponseEnd()
        self._llm = llm

    def ask(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[Piece]:
        """Yield the pieces of the response. Raises as LLM.stream_outputs does."""
        self.response_end = ResponseEnd()
        params = with_changes(self._llm.get_default_sampling_params(), settings.changes)
        options = RequestOptions(lowers_max_tokens=True)
        template_kwargs = settings.template_kwargs
        outputs = self._llm.stream_outputs(messages, params, options=options, chat_template_kwargs=template_kwargs)
        place = num_chars = 0  # the part that was yielded last, and how many of its characters
        with closing(outputs):
            for output in outputs:
                choice = output.outputs[0]
                self.response_end = ResponseEnd(len(choice.token_ids), choice.finish_reason)
                for part in choice.parts[place:]:
                    if text := part.text[num_chars:]:
                        yield Piece("thoughts" if part.kind is PartKind.REASONING else "text", text)
                    num_chars = 0
                if choice.parts:
                    place, num_chars = len(choice.parts) - 1, len(choice.parts[-1].text)


@contextmanager
def opened_local_model(config: EngineConfig) -> Iterator[LocalModel]:
    """Load the model that the config names, and free it at the end. Raises ConfigError or ModelLoadError."""
    from pagewick.llm import LLM

    with LLM(config=config) as llm:
        yield LocalModel(llm, config.model)
