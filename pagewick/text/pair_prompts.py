"""PairPrompts: the prompts from which a reranker reads a query and a document.

Five forms: that of encoders, which have tokens before, between and behind two texts; that of Qwen3-Reranker, as its
model card describes it (huggingface.co/Qwen/Qwen3-Reranker-0.6B); a text with `{query}` and `{document}` in a GGUF file
(llama.cpp's tokenizer.chat_template.rerank); a Jinja template that reads messages with the roles `query` and
`document`, as vLLM's score templates do; and without any of them the document behind the query, as vLLM joins them.

Text of a query, a document or an instruction never becomes a control token of the first four forms: chat_template.py
explains how.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pagewick.errors import ContextLengthError, InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.log import get_logger
from pagewick.pooling_params import Scoring
from pagewick.text.chat_template import PAIR_TEMPLATE, ChatTemplate
from pagewick.text.control_tokens import CUT, Cutter
from pagewick.text.tokenizer import MAX_CHARS_PER_TOKEN, MAX_TRUNCATED_CHARS, Tokenizer
from pagewick.text.truncation import tokens_to_keep

LABELLED: Final = "ForSequenceClassification"
# The first is the answer whose probability is the score.
ANSWERS: Final = ("yes", "no")
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_RERANKER: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# GGUF files have the same prompt with a fixed instruction.
_USUAL: Final = QWEN3_RERANKER.replace("{instruction}", INSTRUCTION)
_FIELD: Final = re.compile(r"\{(instruction|query|document)\}")
# In the source of a Jinja template, the roles of a pair.
_ROLES: Final = (re.compile("""["']query["']"""), re.compile("""["']document["']"""))

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """instruction: what makes a document match the query; None: the model's own."""

    query: str
    document: str
    instruction: str | None = None


class _Form(Protocol):
    """How a pair becomes a prompt. reads_instruction: whether the prompt has a place for an instruction."""

    reads_instruction: bool

    def token_ids(self, pair: Pair, limit: int | None, max_len: int) -> list[int]:
        """Encode a pair. limit: cut the document's end so that the prompt has at most this number of tokens.

        Raises ContextLengthError, InvalidRequestError.
        """
        ...


class PairPrompts:
    """Makes the prompts of one reranker; may be used by several threads at once.

    label_ids: the tokens whose logits give the score, the wanted answer first; empty for a model with a head of labels.
    separator_id: the token behind which an encoder's tokens have the second type; -1: all have the first.
    """

    def __init__(self, form: _Form, label_ids: Sequence[int] = ()) -> None:
        self._form = form
        self.label_ids = tuple(label_ids)
        self.separator_id = form.separator_id if isinstance(form, _EncoderForm) else -1

    @classmethod
    def find(
        cls,
        architecture: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        pair_text: str | None,
        *,
        is_qwen3_reranker: bool = False,
        is_whole: bool = False,
        is_encoder: bool = False,
    ) -> PairPrompts | None:
        """Return the prompts of a model; None if nothing says that it is a reranker.

        architecture: that of config.json. template: the user's chat template, or the model's. pair_text: a text with
        {query} and {document} that the model's file has. is_qwen3_reranker: the user's word that the model is one.
        is_whole: the file is one of those that have such a text, so that queries and documents are not just joined.
        is_encoder: the model is one.
        Raises ModelLoadError for a tokenizer without the answers of Qwen3-Reranker, or a text that is missing or cannot
        be used.
        """
        is_labelled = architecture.endswith(LABELLED)
        if not is_labelled and not is_qwen3_reranker:
            return None
        form: _Form
        if is_encoder:
            return cls(_EncoderForm(tokenizer)) if is_labelled else None
        if template is not None and (source := next(filter(is_for_pairs, template.sources), None)) is not None:
            form = _JinjaForm(ChatTemplate({"default": source}, tokenizer), tokenizer)
        elif (is_qwen3_reranker and pair_text is None) or pair_text == _USUAL:
            form = _TextForm(QWEN3_RERANKER, tokenizer)
        elif pair_text is not None:
            form = _TextForm(pair_text, tokenizer)
        elif is_whole:
            raise ModelLoadError(
                "the model's file has no template for pairs of texts, tokenizer.chat_template.rerank\n"
                "  give --rerank if it is a Qwen3-Reranker, or a template that reads messages of the roles query and "
                "document: --chat-template FILE"
            )
        else:
            _logger.info("a document follows its query as it is: the files have no template for pairs of texts")
            form = _JoinedForm(tokenizer)
        return cls(form, () if is_labelled else _answers_of(tokenizer))

    def encode(self, pair: Pair, *, max_len: int, truncate_prompt_tokens: int | None = None) -> list[int]:
        """Encode a pair.

        max_len: the model's context length. truncate_prompt_tokens: cut the document's end so that the prompt has at
        most this number of tokens; -1: max_len.

        Raises UnsupportedError for an instruction that the model does not read or a template that cannot be cut,
        ContextLengthError, and InvalidRequestError if nothing of the document would be left.
        """
        if pair.instruction is not None and not self._form.reads_instruction:
            message = (
                "this model's prompts have no place for an instruction; leave it out, or make it part of the query"
            )
            raise UnsupportedError(message, param="instruction")
        return self._form.token_ids(pair, tokens_to_keep(truncate_prompt_tokens, max_len), max_len)


def scoring_of(pairs: PairPrompts | None, num_labels: int, activation: str) -> tuple[PairPrompts, Scoring]:
    """Return a reranker's prompts, and how it scores them.

    num_labels, activation: of its head of labels; 0 and empty: it has none. Raises UnsupportedError for a model that is
    no reranker.
    """
    if pairs is None:
        raise UnsupportedError(
            "nothing says that this model is a reranker; serve one, such as Qwen3-Reranker with --rerank (in Python "
            "rerank=True), or a model whose architecture ends in ForSequenceClassification"
        )
    if pairs.label_ids:
        return pairs, Scoring(label_ids=pairs.label_ids)
    if not activation:
        usual = "send POST /v1/classify, or use classify"
        raise UnsupportedError(f"this model sorts texts into {num_labels} classes and scores none; {usual}")
    return pairs, Scoring(activation=activation, separator_id=pairs.separator_id)


def pairs_of(
    text_1: object, text_2: object, instruction: str | None = None, names: tuple[str, str] = ("text_1", "text_2")
) -> list[Pair]:
    """Return the pairs of a query and a document: of one query with each document, or of each with its own.

    names: those of the two fields. Raises InvalidRequestError for numbers that do not fit, and for empty or other
    values.
    """
    if instruction is not None and not isinstance(instruction, str):
        raise InvalidRequestError(f"instruction must be a text; got {instruction!r}"[:200], param="instruction")
    queries, documents = _texts(names[0], text_1), _texts(names[1], text_2)
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        counts = f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}"
        raise InvalidRequestError(f"{counts}; give one query, or one for each document", param=names[0])
    return [Pair(*each, instruction) for each in zip(queries, documents, strict=True)]


def _texts(name: str, given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list | tuple) and not texts:
        raise InvalidRequestError(f"{name} is an empty list; give at least one text", param=name)
    if not isinstance(texts, list | tuple):
        raise InvalidRequestError(f"{name} must be a text or a list of texts", param=name)
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            where = name if isinstance(given, str) else f"{name}[{place}]"
            raise InvalidRequestError(f"{where} must be a text that is not empty", param=name)
    return list(texts)


def is_for_pairs(source: str) -> bool:
    """Whether a Jinja template reads the roles of a pair."""
    return all(role.search(source) for role in _ROLES)


def pair_text_of(settings: Mapping[str, Any]) -> str | None:
    """Return the text with {query} and {document} of a GGUF file, whose templates stand in its tokenizer's settings."""
    listed = settings.get("chat_template")
    if not isinstance(listed, list):
        return None
    named = {one.get("name"): one.get("template") for one in listed if isinstance(one, Mapping)}
    return text if isinstance(text := named.get(PAIR_TEMPLATE), str) else None


def _answers_of(tokenizer: Tokenizer) -> list[int]:
    found = [tokenizer.id_of(answer) for answer in ANSWERS]
    known = [token_id for token_id in found if token_id is not None]
    if len(known) < len(found):
        raise ModelLoadError(f"the tokenizer has no tokens {' and '.join(ANSWERS)}, which a Qwen3-Reranker answers")
    return known


class _TextForm:
    """A text in which the names of the fields stand in braces."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        # Words of the text and names of fields take turns.
        words, names = _FIELD.split(text)[::2], _FIELD.split(text)[1::2]
        if not {"query", "document"} <= set(names) or names.count("document") != 1:
            raise ModelLoadError(
                f"the model's template for pairs must have {{query}} and one {{document}}; it is {text[:200]!r}\n"
                "  give a Jinja template that reads messages of the roles query and document: --chat-template FILE"
            )
        self.reads_instruction = "instruction" in names
        self._tokenizer = tokenizer
        place = names.index("document")
        self._head = list(zip(words, names[:place], strict=False)), words[place]
        self._tail = list(zip(words[place + 1 :], names[place + 1 :], strict=False)), words[-1]
        added = tokenizer.added_tokens
        self._cutter = Cutter(
            [token for token, is_special in added.items() if is_special or (token.strip() and token in text)]
        )
        self._can_cut = any(words[place + 1].startswith(token) for token in added)

    def token_ids(self, pair: Pair, limit: int | None, max_len: int) -> list[int]:
        fields = {"instruction": pair.instruction or INSTRUCTION, "query": pair.query}
        fields = {name: self._cutter.cut(value) for name, value in fields.items()}
        document = self._cutter.cut(pair.document)
        fields["document"] = document
        head, tail = _filled(*self._head, fields), _filled(*self._tail, fields)
        if limit is None:
            return self._tokenizer.encode_pieces((head + document + tail).split(CUT), max_len=max_len)
        if not self._can_cut:
            raise _cannot_cut("no control token follows the document in its template")
        _check_num_chars(pair, limit)
        # A control token never merges with the text before it, so that what follows the document is encoded by itself.
        begin, end, before = ([*self._encode(text)] for text in (head + document, tail, head))
        return _shortened(begin, end, limit, len(before))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_pieces(text.split(CUT))


class _EncoderForm:
    """A query and a document, with the tokens around them that the tokenizer adds to a pair of texts."""

    reads_instruction = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before, self._between, self._behind = tokenizer.pair_edges
        self._cutter = Cutter([token for token, is_special in tokenizer.added_tokens.items() if is_special])
        self.separator_id = self._between[0] if self._between and tokenizer.has_pair_types else -1

    def token_ids(self, pair: Pair, limit: int | None, max_len: int) -> list[int]:
        if limit is not None:
            _check_num_chars(pair, limit)
        length = max_len if limit is None else None
        query, document = (
            self._tokenizer.encode_pieces(self._cutter.cut(text).split(CUT), max_len=length)
            for text in (pair.query, pair.document)
        )
        head = [*self._before, *query, *self._between]
        if limit is None:
            return [*head, *document, *self._behind]
        return _shortened([*head, *document], self._behind, limit, len(head))


class _JoinedForm:
    """The query and the document, one behind the other, with the tokens that the model expects around a text."""

    reads_instruction = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_ids(self, pair: Pair, limit: int | None, max_len: int) -> list[int]:
        text = pair.query + pair.document
        if limit is None:
            return self._tokenizer.encode(text, add_special_tokens=True, max_len=max_len)
        _check_num_chars(pair, limit)
        whole = self._tokenizer.encode(text, add_special_tokens=True)
        plain, before = (self._tokenizer.encode(each, add_special_tokens=False) for each in (text, pair.query))
        start = self._tokenizer.start_token_ids
        end = whole[len(start) + len(plain) :]
        return _shortened([*start, *plain], end, limit, len(start) + len(before))


class _JinjaForm:
    """A template that reads messages with the roles query and document, and a variable `instruction`."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.reads_instruction = "instruction" in template.variables
        self._template, self._tokenizer = template, tokenizer

    def token_ids(self, pair: Pair, limit: int | None, max_len: int) -> list[int]:
        if limit is not None:
            raise _cannot_cut("a Jinja template may write it anywhere")
        messages = [{"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}]
        given: dict[str, Any] = {} if pair.instruction is None else {"instruction": pair.instruction}
        rendered = self._template.render(messages, add_generation_prompt=False, **given)
        return self._tokenizer.encode_pieces(rendered.pieces, max_len=max_len)


def _filled(parts: Sequence[tuple[str, str]], last: str, fields: Mapping[str, str]) -> str:
    return "".join(f"{words}{fields[name]}" for words, name in parts) + last


def _shortened(begin: list[int], end: list[int], limit: int, num_before: int) -> list[int]:
    """Cut tokens from the end of `begin`, whose first num_before ones stand before the document.

    Raises InvalidRequestError if none of the document were left.
    """
    room = limit - len(end)
    if len(begin) > room <= num_before:
        message = (
            f"{limit} tokens leave no room for a document: the prompt has {num_before + len(end)} without one. Raise "
            "truncate_prompt_tokens, or shorten the query"
        )
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return [*begin[:room], *end]


def _check_num_chars(pair: Pair, limit: int) -> None:
    """Raise ContextLengthError for a pair that takes long to encode, although it is cut to `limit` tokens."""
    num_chars = len(pair.query) + len(pair.document) + len(pair.instruction or "")
    if num_chars > (most := max(MAX_TRUNCATED_CHARS, limit * MAX_CHARS_PER_TOKEN)):
        message = (
            f"query and document have {num_chars} characters, more than the limit of {most} for truncation to {limit} "
            "tokens; send only the beginning of the document"
        )
        raise ContextLengthError(message)


def _cannot_cut(reason: str) -> UnsupportedError:
    message = f"the prompts of this model cannot be truncated: {reason}; leave out truncate_prompt_tokens"
    return UnsupportedError(message, param="truncate_prompt_tokens")
