"""The known formats of tool calls: by name, and by a chat template's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewick.errors import ConfigError
from pagewick.outputs import PartKind
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.part_splitter import PartSplitter, Splitting
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.apertus import APERTUS
from pagewick.text.tool_calls.bare_json import LLAMA_3, PLAIN_JSON, XLAM
from pagewick.text.tool_calls.command_r import COMMAND_R, COMMAND_R7B
from pagewick.text.tool_calls.deepseek import DEEPSEEK_3, DEEPSEEK_3_1
from pagewick.text.tool_calls.dsml import DEEPSEEK_3_2, DEEPSEEK_4
from pagewick.text.tool_calls.elements import MINIMAX_M3
from pagewick.text.tool_calls.firefunction import FIREFUNCTION_2
from pagewick.text.tool_calls.functionary import FUNCTIONARY_3_1, FUNCTIONARY_3_2
from pagewick.text.tool_calls.gemma import FUNCTION_GEMMA, GEMMA_3, GEMMA_4
from pagewick.text.tool_calls.gigachat import GIGACHAT_3, GIGACHAT_3_1
from pagewick.text.tool_calls.glm import GLM_4, GLM_4_5
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.granite import GRANITE
from pagewick.text.tool_calls.harmony import HARMONY
from pagewick.text.tool_calls.hermes import HERMES
from pagewick.text.tool_calls.hunyuan import HUNYUAN, HUNYUAN_LIST, HY_3, HY_3_PREVIEW
from pagewick.text.tool_calls.internlm import INTERNLM
from pagewick.text.tool_calls.kimi import KIMI_K2
from pagewick.text.tool_calls.kimi_sections import KIMI_K3
from pagewick.text.tool_calls.lfm2 import LFM_2
from pagewick.text.tool_calls.minicpm import MINICPM_5
from pagewick.text.tool_calls.minimax import MINIMAX_M1, MINIMAX_M2
from pagewick.text.tool_calls.mistral import MISTRAL, MISTRAL_11
from pagewick.text.tool_calls.muse import MUSE_GLIMMER
from pagewick.text.tool_calls.nemotron import NEMOTRON, NEMOTRON_4
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.olmo import OLMO_3
from pagewick.text.tool_calls.phi import PHI_4_MINI
from pagewick.text.tool_calls.pythonic import PYTHONIC
from pagewick.text.tool_calls.qwen_coder import MIMO, QWEN_3_CODER
from pagewick.text.tool_calls.seed_oss import SEED_OSS
from pagewick.text.tool_calls.smollm import SMOLLM_3_CODE
from pagewick.text.tool_calls.solar import SOLAR_OPEN
from pagewick.text.tool_calls.splitter import CallFormat, CallSplitter

_ALL = (
    HERMES, QWEN_3_CODER, LLAMA_3, PYTHONIC, MISTRAL, MISTRAL_11, DEEPSEEK_3, DEEPSEEK_3_1, GLM_4, GLM_4_5, PHI_4_MINI,
    HARMONY, GEMMA_3, FUNCTION_GEMMA, GEMMA_4, GRANITE, COMMAND_R, COMMAND_R7B, KIMI_K2, MINIMAX_M2, OLMO_3, SEED_OSS,
    SMOLLM_3_CODE, DEEPSEEK_3_2, LFM_2, NEMOTRON, NEMOTRON_4, HUNYUAN, HUNYUAN_LIST, HY_3, HY_3_PREVIEW,
    MIMO, APERTUS, INTERNLM, SOLAR_OPEN, XLAM, PLAIN_JSON, DEEPSEEK_4, MINICPM_5, GIGACHAT_3, GIGACHAT_3_1,
    FIREFUNCTION_2, FUNCTIONARY_3_1, FUNCTIONARY_3_2, MINIMAX_M1, MINIMAX_M3, MUSE_GLIMMER, KIMI_K3,
)  # fmt: skip
BY_NAME: Mapping[str, CallFormat] = {form.name: form for form in _ALL}
# Tokens at the end of a prompt that may decide how its responses are split.
_NUM_LAST = 16
# Other programs' names, most of them vLLM's.
ALIASES: Mapping[str, str] = {
    "apertus2509": "apertus",
    "cohere_command3": "command_r7b",
    "cohere_command4": "command_r7b",
    "cohere_command_r": "command_r",
    "deepseek_r1": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "ernie45": "hermes",
    "exaone4": "hermes",
    "functiongemma": "functiongemma",
    "gemma": "gemma3",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt-oss": "openai",
    "gpt_oss": "openai",
    "granite-20b-fc": "granite",
    "granite4": "hermes",
    "harmony": "openai",
    "interns1": "internlm",
    "jamba": "hunyuan_a13b",
    "llama": "llama3_json",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "lfm2.5": "lfm2",
    "minimax": "minimax_m1",
    "mistral_v3": "mistral",
    "mistral_v7": "mistral",
    "nemotron": "nemotron_json",
    "nemotron_nano_v2": "nemotron_json",
    "phi4_mini": "phi4_mini_json",
    "poolside_v1": "glm45",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "qwen_coder": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "trinity": "hermes",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
}
# A format is the first one all of whose words are in a template.
_SIGNS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (SOLAR_OPEN, ("<|tool_call:begin|>",)),
    (KIMI_K3, ("<|open|>", "<|sep|>")),
    (MUSE_GLIMMER, ("<atem:function_calls>", "<|message|>")),
    (SEED_OSS, ("<seed:tool_call>",)),
    (MINIMAX_M3, ("]<]minimax[>[",)),
    (LFM_2, ("<|tool_list_start|>",)),
    (LFM_2, ("<|tool_call_start|>",)),
    (LFM_2, ("List of tools: ", "keep_past_thinking")),  # the first of LFM2.5
    (NEMOTRON, ("<TOOLCALL>",)),
    (NEMOTRON_4, ("<extra_id_1>", "<tool>")),
    (APERTUS, ("<|tools_prefix|>",)),
    (INTERNLM, ("<|action_start|>",)),
    (HUNYUAN_LIST, ("<tool_calls>[",)),
    (HUNYUAN_LIST, ("<|bom|>", "<tool_calls>")),  # Jamba
    (MINIMAX_M1, ("<tool_calls>", "<beginning_of_sentence>")),
    (HUNYUAN, ("<tool_calls>", "<tool_call>", "```json")),
    (MINICPM_5, ('<function name="', '<param name="')),  # its template has a <tool_sep> of its own
    (HY_3, ("<tool_sep", ":opensource")),
    (HY_3_PREVIEW, ("<tool_sep",)),
    (MIMO, ("<function=", "<parameter=", "parameter tags is preserved exactly as-is")),
    (QWEN_3_CODER, ("<function=", "<parameter=")),
    (FUNCTIONARY_3_1, ("<|start_header_id|>", "<function=")),  # custom tools of Llama 3.1, too
    (FUNCTIONARY_3_2, ("<|start_header_id|>", ">>>all")),
    (GLM_4_5, ("<arg_key>",)),
    (MINIMAX_M2, ("<minimax:tool_call>",)),
    (KIMI_K2, ("<|tool_calls_section_begin|>",)),
    (DEEPSEEK_3_2, ("\uff5cDSML\uff5c", "function_calls", "string=")),
    (DEEPSEEK_4, ("\uff5cDSML\uff5c", "tool_calls>", "string=")),
    (DEEPSEEK_3, ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json")),
    (DEEPSEEK_3_1, ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)),
    (MISTRAL_11, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (GEMMA_4, ("<|tool_call>",)),
    (FUNCTION_GEMMA, ("<start_function_call>",)),
    (GEMMA_3, ("```tool_code",)),
    (COMMAND_R7B, ("<|START_ACTION|>",)),
    (COMMAND_R, ("Action:", "```json", "tool_name")),
    (GIGACHAT_3_1, ("<|function_call|>", "<|role_sep|>")),
    (GIGACHAT_3, ("function call", "<|role_sep|>")),
    (GRANITE, ("<|start_of_role|>", "<|tool_call|>")),
    (PHI_4_MINI, ("<|tool|>",)),
    (PHI_4_MINI, ("<|tool_call|>",)),
    (FIREFUNCTION_2, ("functools[",)),  # templates for Phi-4-mini may have it, too
    (OLMO_3, ("<function_calls>",)),
    (HERMES, ("<tool_call>",)),
    (PYTHONIC, ("<|python_start|>",)),
    (PYTHONIC, ("<|header_start|>", "tools")),
    (XLAM, ("make calls in a single JSON array",)),
    (LLAMA_3, ("<|start_header_id|>", '"parameters":')),
    (LLAMA_3, ("<|python_tag|>",)),
    (GLM_4, ("[gMASK]", "<|observation|>")),
    (GLM_4, ("[gMASK]", "tools")),
)


def format_named(name: str) -> CallFormat:
    """Return the format with one of its names. Raises ConfigError."""
    form = BY_NAME.get(ALIASES.get(name, name))
    if form is None:
        known = ", ".join(sorted(BY_NAME))
        raise ConfigError(f"--tool-call-parser {name!r} is not known; leave it out, or give one of {known}")
    return form


def format_of(templates: Sequence[str]) -> CallFormat:
    """Return the format of a model with these chat templates.

    A model whose templates show none is told to write calls as Hermes does, or as Gemma's documentation has it.
    """
    for form, words in _SIGNS:
        if any(all(word in source for word in words) for source in templates):
            return form
    return GEMMA_3 if any("<start_of_turn>" in source for source in templates) else HERMES


@dataclass(frozen=True, slots=True)
class _CallSplitting:
    form: CallFormat
    offer: ToolOffer | None
    ids: Mapping[str, int]
    streams: bool
    begun: str = ""  # the end of the prompt

    def splitter(self) -> PartSplitter:
        if self.form.own_splitter is not None:
            return self.form.own_splitter(self.offer, self.ids, self.streams, self.begun)
        assert self.offer is not None
        return CallSplitter(self.form, self.offer, self.ids, streams=self.streams)


class ToolCallFormat:
    """A PartFormat: how one model, with its tokenizer, writes calls."""

    def __init__(self, form: CallFormat, tokenizer: Tokenizer) -> None:
        self.form = form
        reasoning = () if form.own_splitter is None else (PartKind.REASONING,)
        self.kinds = frozenset({PartKind.TOOL_CALL, *reasoning})
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens
        ids = {word: tokenizer.id_of(word) for word in form.words if word in added}
        self._ids = {word: token_id for word, token_id in ids.items() if token_id is not None}

    @property
    def json_spacing(self) -> Mapping[str, Any] | None:
        return self.form.json_spacing

    def splitting(
        self, prompt_token_ids: Sequence[int], offer: ToolOffer | None, *, is_guided: bool = False
    ) -> Splitting | None:
        """Return how the responses to one prompt are split; None without tools, unless the format marks all parts."""
        begun = ""
        if self.form.own_splitter is not None and prompt_token_ids:
            begun = self._tokenizer.decode(prompt_token_ids[-_NUM_LAST:], skip_special_tokens=False)
        if offer is None:
            is_split = self.form.own_splitter is not None
            return _CallSplitting(self.form, None, self._ids, streams=False, begun=begun) if is_split else None
        # Text that only resembles a call is not guided.
        is_marked = offer.is_required or not self.form.starts(offer)
        return _CallSplitting(self.form, offer, self._ids, streams=is_guided and is_marked, begun=begun)

    def grammar(self, offer: ToolOffer, limits: GrammarLimits) -> str:
        """Return the grammar of responses that call these tools, in llguidance's Lark.

        Raises InvalidRequestError for a schema beyond the limits, and for a strict tool that it cannot express.
        """
        return self.form.grammar(GrammarWriter(offer, self._ids, limits))

    def form_grammar(self, limits: GrammarLimits) -> str | None:
        """Return the grammar of responses without tools that have a form, if the format marks all their parts."""
        return None if self.form.own_splitter is None else self.grammar(ToolOffer(form="text"), limits)

    def beginnings(self, offer: ToolOffer) -> tuple[str, ...]:
        """Return the texts with which calls begin. A response without calls must not begin with them."""
        return (*self.form.exact_starts(offer), *(opener for opener in self.form.openers if opener not in self._ids))
