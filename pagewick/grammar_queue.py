"""GrammarQueue: compiles the grammars of requests in a thread, so that no running request waits for that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewick import log
from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineRequest
from pagewick.errors import InvalidRequestError
from pagewick.text.grammars.constraint import GrammarCompiler, GrammarSpec, read_spec

if TYPE_CHECKING:
    from pagewick.text.tokenizer import Tokenizer

logger = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request that may be added to the engine. error: why it may not."""

    request: EngineRequest
    error: InvalidRequestError | None = None


class GrammarQueue:
    """One engine's grammars. on_compiled: called in the thread. The other methods belong to the engine's own thread.

    is_prepared: whether the vocabulary that all grammars need has been made, or is being made.
    """

    def __init__(self, config: EngineConfig, on_compiled: Callable[[Compiled], None]) -> None:
        self.compiler = GrammarCompiler(
            lambda: _load_tokenizer(config.tokenizer or config.model), config.grammar_cache_size
        )
        self._on_compiled = on_compiled
        self._waiting: set[str] = set()
        self.is_prepared = False

    def prepare(self, vocab_size: int) -> None:
        """Begin to make the vocabulary that all grammars need; later calls do nothing."""
        if not self.is_prepared:
            self.is_prepared = True
            self._executor.submit(self._prepare, vocab_size)

    def begin(self, request: EngineRequest, vocab_size: int) -> bool:
        """Begin to compile the grammar of a request, if it has one that is not compiled; return whether it has."""
        spec = _spec_of(request)
        if spec is None or self.compiler.is_compiled(spec):
            return False
        self.is_prepared = True
        self._waiting.add(request.request_id)
        self._executor.submit(self._compile, request, spec, vocab_size)
        return True

    def take(self, compiled: Compiled) -> bool:
        """Whether the request is still wanted."""
        is_wanted = compiled.request.request_id in self._waiting
        self._waiting.discard(compiled.request.request_id)
        return is_wanted

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests whose clients have left."""
        self._waiting.difference_update(request_ids)

    @functools.cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    def _prepare(self, vocab_size: int) -> None:
        try:
            self.compiler.prepare(vocab_size)
        except Exception as error:  # a request with a grammar fails again and gets the error
            logger.debug("the vocabulary of grammars cannot be prepared: %s", error)

    def _compile(self, request: EngineRequest, spec: GrammarSpec, vocab_size: int) -> None:
        error = None
        try:
            self.compiler.compile(spec, vocab_size)
        except InvalidRequestError as refusal:
            error = refusal
        except Exception as failure:  # else the client would wait forever
            error = InvalidRequestError(f"{spec.param} cannot be honoured: {failure}", param=spec.param)
        self._on_compiled(Compiled(request, error))


def _load_tokenizer(place: str) -> Tokenizer:
    # Not at the top: only engines that compile a grammar need it.
    from pagewick.text.tokenizer import Tokenizer

    return Tokenizer.from_directory(place)


def _spec_of(request: EngineRequest) -> GrammarSpec | None:
    parts = request.constraint if isinstance(request.constraint, list) else [request.constraint]
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") == "grammar":
            try:
                return read_spec(part)
            except InvalidRequestError:
                return None  # the engine refuses it
    return None
