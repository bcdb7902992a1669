"""LlamaCppApi: the routes that llama.cpp's server has beside OpenAI's, and that this one does not have otherwise."""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick import __version__
from pagewick.errors import InvalidRequestError
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.framing import EventFraming
from pagewick.server.api.json_response import json_response
from pagewick.server.api.llama_cpp.fields import LLAMA_FIELDS, LlamaCompletionRequest, LlamaInfillRequest
from pagewick.server.api.llama_cpp.rendering import LlamaForm, LlamaResponse, settings_of
from pagewick.server.api.llama_cpp.responses import LlamaCompletion, LlamaPiece, Modalities, Properties, Slot
from pagewick.server.api.operation import Operation, describes
from pagewick.server.core.request_context import RequestContext
from pagewick.server.errors import ApiError

# Its streams end with the last event, without a further mark.
LLAMA_EVENTS = EventFraming(error_body=attrgetter("body"))

_GENERATING = Operation(
    tag="llama.cpp's API", known=LLAMA_FIELDS, errors=(404, 429, 500, 504), response=LlamaCompletion,
    chunk=(LlamaPiece, LlamaCompletion),
)  # fmt: skip
_ABOUT = Operation(tag="llama.cpp's API")


class LlamaCppApi(Dialect):
    """The handlers."""

    framing = LLAMA_EVENTS
    known_fields = LLAMA_FIELDS

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.completion, methods=["POST"]) for path in ("/completion", "/completions")),
            Route("/infill", self.infill, methods=["POST"]),
            Route("/props", self.props, methods=["GET"]),
            Route("/slots", self.slots, methods=["GET"]),
        ]

    @describes(replace(_GENERATING, request=LlamaCompletionRequest))
    async def completion(self, request: Request) -> Response:
        """Continue texts or tokens."""
        body, ignored = await self.read(request, LlamaCompletionRequest)
        return await self._answer(request, body, ignored)

    @describes(replace(_GENERATING, request=LlamaInfillRequest))
    async def infill(self, request: Request) -> Response:
        """Write the text between two others."""
        body, ignored = await self.read(request, LlamaInfillRequest)
        if not self.core.engine.can_infill:
            message = "this model cannot infill: its vocabulary has no infill tokens; use a code model that has some"
            raise InvalidRequestError(message, param="input_suffix")
        return await self._answer(request, body, ignored)

    @describes(replace(_ABOUT, response=Properties))
    async def props(self, request: Request) -> Response:
        """Return what the server is, and the settings of requests that give none."""
        engine = self.core.engine
        info, tokenizer = engine.info, engine.tokenizer
        settings = settings_of(engine.default_params, info.max_model_len)
        return json_response(
            Properties(
                default_generation_settings={"id": 0, "n_ctx": info.max_model_len, "params": settings},
                total_slots=info.max_num_seqs,
                model_alias=self.settings.model_name,
                model_path=info.model_path,
                modalities=Modalities(vision=self.reads_images),
                chat_template=engine.chat_template_source,
                bos_token=tokenizer.bos_token or "",
                eos_token=tokenizer.eos_token or "",
                build_info=f"pagewick-{__version__}",
            )
        )

    @describes(replace(_ABOUT, response="application/json"))
    async def slots(self, request: Request) -> Response:
        """List the places for sequences, as many of them busy as requests are running."""
        info, num_running = self.core.engine.info, self.core.engine.stats.num_requests_running
        if request.query_params.get("fail_on_no_slot") == "1" and num_running >= info.max_num_seqs:
            raise ApiError(503, "no slot is free; try again later", code="no_slot_available")
        numbers, context = range(info.max_num_seqs), info.max_model_len
        return json_response([Slot(id=one, n_ctx=context, is_processing=one < num_running) for one in numbers])

    async def _answer(
        self, request: Request, body: LlamaCompletionRequest | LlamaInfillRequest, ignored: list[str]
    ) -> Response:
        wanted = body.prompts_request()
        start = partial(self.core.start_prompts, RequestContext.of(request), wanted)
        engine = self.core.engine
        form = LlamaForm(
            model=self.shown_model(body.model),
            decode=engine.decode,
            max_model_len=engine.info.max_model_len,
            is_list=body.has_several,
            wants_tokens=bool(body.return_tokens),
            wants_probabilities=bool(body.n_probs),
            wants_timings=bool(body.timings_per_token),
            response_fields=body.response_fields,
        )
        response = LlamaResponse(await self.admission.run(request, start), form)
        return self.stream(response, ignored) if wanted.is_stream else await self.whole(request, response, ignored)
