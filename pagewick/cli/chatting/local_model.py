"""LocalModel: a model in this process answers."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pagewick.cli.chatting.conversation import Ending, Message
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.chatting.thoughts import OPEN, Piece, ThoughtSplitter
from pagewick.config import EngineConfig
from pagewick.sampling_params import SamplingParams, with_changes

if TYPE_CHECKING:
    from pagewick.llm import LLM


class LocalModel:
    """A ChatModel over LLM."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.name = name
        self.defaults: SamplingParams | None = llm.get_default_sampling_params()
        self.ending = Ending()
        self._llm = llm

    def ask(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[Piece]:
        """Raises as LLM.stream does."""
        self.ending = Ending()
        params = with_changes(self._llm.get_default_sampling_params(), settings.changes)
        kwargs = settings.template_kwargs
        prompt = self._llm.apply_chat_template(messages, **kwargs)
        splitter = ThoughtSplitter(is_thinking=prompt.rstrip().endswith(OPEN))
        said = ""
        try:
            for text in self._llm.stream(messages, params, chat_template_kwargs=kwargs):
                said += text
                yield from splitter.feed(text)
            yield from splitter.end()
        finally:
            num_tokens = len(self._llm.get_tokenizer().encode(said, add_special_tokens=False))
            self.ending = Ending(num_tokens)


@contextmanager
def opened_local_model(config: EngineConfig) -> Iterator[LocalModel]:
    """The model that the config names, loaded, and freed at the end. Raises ConfigError, ModelLoadError."""
    from pagewick.llm import LLM

    with LLM(config=config) as llm:
        yield LocalModel(llm, config.model)
