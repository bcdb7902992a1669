"""A drafter that knows what requests are answered."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pagewick.engine.messages import EngineRequest
from pagewick.engine.speculation.drafting import DraftRequest
from tests.engine.serving import Answers


class Foresight:
    """Proposes the tokens of answers, each with probability `share`, and else others. Seeds identify requests."""

    def __init__(self, wanted: Sequence[EngineRequest], answers: Answers, share: float, vocab_size: int) -> None:
        self._share, self._vocab_size, self._random = share, vocab_size, Random(5)
        self._texts = {
            (each.seed, choice): each.prompt_token_ids + answers[each.request_id, choice].token_ids
            for each in wanted
            for choice in range(each.params.n)
        }

    def start(self, slot: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = []
        for one in requests:
            text, begin = self._texts[one.sampling.seed, one.sampling.choice_index], len(one.token_ids)
            assert list(one.token_ids) == text[:begin]
            found.append([
                token_id if self._random.random() < self._share else (token_id + 1) % self._vocab_size
                for token_id in text[begin : begin + one.num_tokens]
            ])  # fmt: skip
        return found
