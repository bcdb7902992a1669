"""Log-probabilities in the form of /v1/completions, where each token has its offset in the text, and echoed prompts."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from pagewick.outputs import Logprob
from pagewick.server.api.responses import CompletionLogprobs
from pagewick.text.output_stream import PositionLogprobs, TokenChoice
from pagewick.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as the text that completions begin with. offsets: where in the text each token begins."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, token_ids: Sequence[int], given: str | None) -> EchoedPrompt:
        """Keep the text as it was given; decode the tokens if none was given, or the tokenizer changed it.

        A token that was added around the given text has no characters of it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        parts: list[str] = []
        offsets: list[int] = []
        length = 0
        for token_id in token_ids:
            offsets.append(length)
            parts.append(decoder.decode(tokenizer.token_bytes(token_id)))
            length += len(parts[-1])
        text = "".join(parts) + decoder.decode(b"", final=True)
        if given is None or given not in text:
            return cls(text, token_ids, offsets)
        start = text.rfind(given)
        return cls(given, token_ids, [min(max(offset - start, 0), len(given)) for offset in offsets])

    def logprobs(
        self, tokenizer: Tokenizer, positions: Sequence[Mapping[int, Logprob] | None], num_logprobs: int
    ) -> CompletionLogprobs:
        """positions: RequestOutput.prompt_logprobs, which may have more alternatives than are wanted here."""

        def name(token_id: int) -> str:
            return tokenizer.token_bytes(token_id).decode(errors="replace")

        def top(chosen_id: int, position: Mapping[int, Logprob]) -> dict[str, float]:
            ranked = sorted(position, key=lambda token_id: position[token_id].rank)
            found: dict[str, float] = {}
            for token_id in ranked:
                if token_id == chosen_id or position[token_id].rank <= num_logprobs:
                    found.setdefault(name(token_id), position[token_id].logprob)
            return found

        known = list(zip(self.token_ids, positions, strict=True))
        return CompletionLogprobs(
            tokens=[name(token_id) for token_id in self.token_ids],
            token_logprobs=[None if one is None else one[token_id].logprob for token_id, one in known],
            top_logprobs=[None if one is None else top(token_id, one) for token_id, one in known],
            text_offset=[*self.offsets],
        )


class ChoiceLogprobs:
    """Collects the log-probabilities of one choice. offset: where its text begins."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._positions: list[tuple[int, PositionLogprobs]] = []

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for one in positions:
            self._positions.append((self._offset, one))
            self._offset += len(self._decoder.decode(one.chosen.shown))

    def add_end(self, position: Mapping[int, Logprob]) -> None:
        """Add the token that ended the text, as `CompletionOutput.logprobs` has it; no characters belong to it."""
        choices = [(one.rank, TokenChoice(one.decoded_token.encode(), one.logprob, True)) for one in position.values()]
        top = [choice for _, choice in sorted(choices, key=itemgetter(0))]
        self.add([PositionLogprobs(choices[0][1], top)])

    def take(self, *, after: CompletionLogprobs | None = None) -> CompletionLogprobs:
        """Return everything that has been added since the last call, after those in `after` (an echoed prompt's)."""
        taken, self._positions = self._positions, []
        before = after or CompletionLogprobs([], [], [], [])
        return CompletionLogprobs(
            tokens=before.tokens + [one.chosen.token for _, one in taken],
            token_logprobs=before.token_logprobs + [one.chosen.logprob for _, one in taken],
            top_logprobs=before.top_logprobs + [self._top(one) for _, one in taken],
            text_offset=before.text_offset + [offset for offset, _ in taken],
        )

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Map texts to log-probabilities. If tokens have the same text, the best counts. The chosen one is included."""
        top: dict[str, float] = {}
        for other in (*position.top, position.chosen):
            top.setdefault(other.token, other.logprob)
        return top
