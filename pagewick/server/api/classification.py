"""Classes of texts in the form of vLLM's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from pagewick.generation import Generation, run_all
from pagewick.pooling_params import Classification
from pagewick.server.api.input_fields import InputFields
from pagewick.server.api.request_fields import one_of


class ClassificationRequest(InputFields, kw_only=True):
    """Asks for the probabilities of the model's labels for texts, or for lists of token ids.

    use_activation: with false, the logits of the labels are returned in place of their probabilities.
    activation: another name of use_activation.
    """

    use_activation: bool | None = None
    activation: bool | None = None

    def __post_init__(self) -> None:
        one_of(use_activation=self.use_activation, activation=self.activation)

    @property
    def wants_probabilities(self) -> bool:
        return self.use_activation is not False and self.activation is not False


class ClassificationData(Struct, kw_only=True):
    """index: the text's place in the request. label: name of the label with the largest number. probs: one number for
    each label, in the model's order. num_classes: their number.
    """

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ClassificationList(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[ClassificationData]
    usage: ClassificationUsage


@dataclass(frozen=True, slots=True)
class ClassificationResponse:
    """The response to a request, once all its prompts have been computed."""

    generations: Sequence[Generation]
    how: Classification
    model: str
    at_once: int

    async def whole(self) -> ClassificationList:
        await run_all(self.generations, self.at_once)
        num_tokens = sum(len(one.output.prompt_token_ids) for one in self.generations)
        return ClassificationList(
            id=f"classify-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model,
            data=[self._data(place, one.output.pooled) for place, one in enumerate(self.generations)],
            usage=ClassificationUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )

    def _data(self, place: int, pooled: bytes) -> ClassificationData:
        probs = self.how.probabilities(pooled)
        return ClassificationData(index=place, label=self.how.label(pooled), probs=probs, num_classes=len(probs))
