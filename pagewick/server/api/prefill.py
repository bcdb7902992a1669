"""PrefillApi: computes prompts ahead, for requests that follow or for other servers that share the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.generation import Generation, run_all
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.input_fields import InputFields
from pagewick.server.api.known_fields import OPENAI_FIELDS
from pagewick.server.api.openai import OPENAI_EVENTS
from pagewick.server.api.operation import Operation, describes
from pagewick.server.core.request import PromptsRequest
from pagewick.server.core.request_context import RequestContext


class PrefillRequest(InputFields, kw_only=True):
    """Asks for the blocks of texts, or of lists of token ids. A request that begins with one of them finds them.

    truncate_prompt_tokens: as for completions, which keep the last tokens.
    """

    def prefill_request(self) -> PromptsRequest:
        """Make the core's request. Raises InvalidRequestError."""
        request = self.prompts_request(None)
        return replace(request, serving=replace(request.serving, is_prefill=True))


class PrefillUsage(Struct, kw_only=True):
    """prompt_tokens: those of all prompts; cached_tokens: how many of them the cache had already."""

    prompt_tokens: int
    cached_tokens: int


class Prefill(Struct, kw_only=True):
    object: str = "prefill"
    model: str
    usage: PrefillUsage


@dataclass(frozen=True, slots=True)
class PrefillResponse:
    """The response to a request, once all its prompts have been computed."""

    generations: Sequence[Generation]
    model: str
    at_once: int

    async def whole(self) -> Prefill:
        """Run the requests to their end."""
        await run_all(self.generations, self.at_once)
        outputs = [one.output for one in self.generations]
        usage = PrefillUsage(
            prompt_tokens=sum(len(one.prompt_token_ids) for one in outputs),
            cached_tokens=sum(one.num_cached_tokens for one in outputs),
        )
        return Prefill(model=self.model, usage=usage)


class PrefillApi(Dialect):
    """The handler."""

    framing = OPENAI_EVENTS
    known_fields = OPENAI_FIELDS

    def routes(self) -> list[Route]:
        return [Route("/v1/prefill", self.prefill, methods=["POST"])]

    @describes(
        Operation(
            tag="KV cache",
            request=PrefillRequest,
            response=Prefill,
            known=OPENAI_FIELDS,
            errors=(404, 429, 500, 504),
        )
    )
    async def prefill(self, request: Request) -> Response:
        """Compute prompts, and keep their keys and values for requests that begin with them."""
        body, ignored = await self.read(request, PrefillRequest)
        start = partial(self._start, RequestContext.of(request), body)
        return await self.whole(request, await self.admission.run(request, start), ignored)

    async def _start(self, context: RequestContext, body: PrefillRequest) -> PrefillResponse:
        generations = await self.core.start_prompts(context, body.prefill_request())
        return PrefillResponse(generations, self.shown_model(body.model), self.admission.num_at_once)
