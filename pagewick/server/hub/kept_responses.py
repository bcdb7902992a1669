"""The responses that all API processes of a server keep together: the hub has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewick.server.core.stored_responses import StoredResponses
from pagewick.server.hub.messages import FindResponse, ForgetResponse, KeepResponse, OfResponses
from pagewick.server.hub.questions import Questions


class HubResponses:
    """The ResponseStore of a server with several API processes."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions

    async def keep(self, owner: str, response_id: str, body: bytes, item_ids: Sequence[str]) -> None:
        # The answer counts: a client may go on from the response at once, through another process.
        await self._ask(KeepResponse(self._questions.next_ticket(), owner, response_id, body, list(item_ids)), bool)

    async def find(self, owner: str, response_id: str) -> bytes | None:
        return await self._find(FindResponse(self._questions.next_ticket(), owner, response_id))

    async def find_by_item(self, owner: str, item_id: str) -> bytes | None:
        return await self._find(FindResponse(self._questions.next_ticket(), owner, item_id, by_item=True))

    async def forget(self, owner: str, response_id: str) -> bool:
        return bool(await self._ask(ForgetResponse(self._questions.next_ticket(), owner, response_id), bool))

    async def _find(self, question: FindResponse) -> bytes | None:
        kind: Any = bytes | None
        found: bytes | None = await self._ask(question, kind)
        return found

    async def _ask(self, question: OfResponses, kind: Any) -> Any:
        return await self._questions.ask(question, kind)


def answer_of(question: OfResponses, responses: StoredResponses) -> bytes | bool | None:
    """Return the hub's answer to a question about kept responses."""
    match question:
        case KeepResponse():
            responses.keep(question.owner, question.response_id, question.body, question.item_ids)
            return True
        case FindResponse():
            find = responses.find_by_item if question.by_item else responses.find
            return find(question.owner, question.name)
        case ForgetResponse():
            return responses.forget(question.owner, question.response_id)
