"""GrammarQueue: compiles the grammars of requests in a thread, so that no running request waits for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineRequest
from pagewick.errors import InvalidRequestError
from pagewick.text.grammars.constraint import GrammarCompiler, GrammarSpec, read_spec

if TYPE_CHECKING:
    from pagewick.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request that may be added to the engine. error: why it may not."""

    request: EngineRequest
    error: InvalidRequestError | None = None


class GrammarQueue:
    """One engine's grammars. on_compiled: called in the thread. The other methods belong to the engine's own thread."""

    def __init__(self, config: EngineConfig, on_compiled: Callable[[Compiled], None]) -> None:
        self.compiler = GrammarCompiler(
            lambda: _load_tokenizer(config.tokenizer or config.model), config.grammar_cache_size
        )
        self._on_compiled = on_compiled
        self._waiting: set[str] = set()
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, request: EngineRequest, vocab_size: int) -> bool:
        """Begin to compile the grammar of a request, if it has one that is not compiled; return whether it has."""
        spec = _spec_of(request)
        if spec is None or self.compiler.is_compiled(spec):
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._waiting.add(request.request_id)
        self._thread.submit(self._compile, request, spec, vocab_size)
        return True

    def take(self, compiled: Compiled) -> bool:
        """Whether the request is still wanted."""
        is_wanted = compiled.request.request_id in self._waiting
        self._waiting.discard(compiled.request.request_id)
        return is_wanted

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests whose clients have left."""
        self._waiting.difference_update(request_ids)

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
