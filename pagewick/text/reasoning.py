"""Reasoning: finds a model's reasoning tags, and splits its output into thoughts and text.

    <think>\\nIt is a sum.\\n</think>\\n\\nFour.        reasoning: "It is a sum."   text: "Four."

Only a thought at the very beginning of a response counts. Many chat templates write the opening tag themselves, so
the end of the prompt decides whether a response begins inside a thought.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from pagewick.outputs import PartKind
from pagewick.text.answer_tags import AnswerSplitter, AnswerTags
from pagewick.text.part_splitter import ChainedSplitter, PartSplitter
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tokenizer import Tokenizer

# White space that may precede a thought, and follow a thought that the prompt has closed.
BLANKS = " \t\r\n"
# Looked up once: see outputs.py.
_TEXT, _REASONING, _DROPPED = PartKind.TEXT, PartKind.REASONING, PartKind.DROPPED
# Dropped together with the tag that they surround.
LINE_BREAKS = "\r\n"

USUAL_TAGS = ("<think>", "</think>")
# A model uses the first pair of this list that it has. gpt-oss uses channels instead of tags.
KNOWN_TAGS = (
    ("<|channel>", "<channel|>"),  # Gemma 4, whose templates also mention <|think|>
    ("<think:opensource>", "</think:opensource>"),  # Hy3, whose template puts the tags together
    USUAL_TAGS,  # DeepSeek, Qwen, GLM, MiniMax, Kimi, Nemotron, Phi, OLMo and most others
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|think|>", "<|/think|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel, whose templates also mention <thinking>
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE
    ("<reasoning>", "</reasoning>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
# Templates with this word mark all parts of a response; the format of Solar Open's calls separates its thoughts.
_MARKS_ALL_PARTS = "<|tool_call:begin|>"
# A word on a line of its own that a model writes behind the opening tag.
LABELS = {"<|channel>": "thought"}
# Opening tags of models that begin a response without a thought with the closing tag.
_LEFT_OUT = frozenset({"<mm:think>"})
# Tokens that a model writes within thoughts, so that they end no turn: Seed-OSS states how much of its budget is left.
_INNER_TOKENS = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
# Represent tags that are tokens of their own while an output is split. No decoded text has a lone surrogate.
START_MARK, END_MARK = "\ud800", "\ud801"


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """A model's tags, as text and as the tokens that write them in the middle of a text.

    are_tokens: each tag is one added token of the vocabulary; the same letters in other tokens are text. answer:
    the tags that the model may put around its answer.
    """

    start: str
    end: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    are_tokens: bool
    answer: AnswerTags | None = None

    @property
    def label(self) -> str:
        return LABELS.get(self.start, "")

    @property
    def may_end_first(self) -> bool:
        """Whether a closing tag at the beginning of a response is an empty thought, not text."""
        return self.start in _LEFT_OUT

    @classmethod
    def find(cls, tokenizer: Tokenizer, templates: Iterable[str]) -> Self | None:
        """Find a model's tags: the first known pair that its chat template mentions, else that its vocabulary has.

        A pair that the vocabulary cannot write counts as unknown.
        """
        sources = list(templates)
        if any(_MARKS_ALL_PARTS in source for source in sources):
            return None
        added = tokenizer.added_tokens
        mentioned = [tags for tags in KNOWN_TAGS if any(tag in source for source in sources for tag in tags)]
        for start, end in (*mentioned, *(tags for tags in KNOWN_TAGS if added.keys() >= {*tags})):
            start_ids, end_ids = (tuple(tokenizer.encode_pieces(["", tag])) for tag in (start, end))
            if not start_ids or not end_ids:
                continue
            are_tokens = added.keys() >= {start, end} and len(start_ids) == len(end_ids) == 1
            return cls(start, end, start_ids, end_ids, are_tokens, AnswerTags.find(tokenizer, sources))
        return None


class Stage(IntEnum):
    """How far a response has got.

    AWAITED: only white space so far; a thought or text may follow. OPENED: after the opening tag, only line breaks so
    far. INSIDE: inside a thought. CLOSED: after the closing tag, only line breaks so far. OVER: everything is text.
    """

    AWAITED = 0
    OPENED = 1
    INSIDE = 2
    CLOSED = 3
    OVER = 4


# A piece of the output with its kind.
TextRun = tuple[PartKind, str]


class ReasoningSplitter:
    """A PartSplitter for thoughts and text.

    start, end: the tags, or their marks. stage: the stage at the end of the prompt. label: see LABELS. may_end_first:
    see ReasoningTags. has_thought: whether there is a thought, even an empty one.
    """

    def __init__(
        self,
        start: str,
        end: str,
        stage: Stage,
        marks: Mapping[int, str] | None = None,
        *,
        label: str = "",
        may_end_first: bool = False,
    ) -> None:
        self.marks = marks or {}
        self.stage = stage
        self.has_thought = stage in (Stage.OPENED, Stage.INSIDE)
        self._start = start
        self._end = end
        self._label = label and f"{label}\n"
        self._first_tags = (start, end) if may_end_first else (start,)
        # White space whose kind depends on the next word, and text that may become a tag. They are separate because the
        # white space may be very long and must not be searched again.
        self._blanks: list[str] = []
        self._held = ""

    @property
    def is_over(self) -> bool:
        """Whether all further output is text."""
        return self.stage == Stage.OVER

    @property
    def kind(self) -> PartKind | None:
        """Line breaks after a thought belong to the thought; the kind of white space before a thought is undecided."""
        if self.stage == Stage.OVER:
            return _TEXT
        return _REASONING if self.has_thought else None

    def feed(self, text: str) -> list[TextRun]:
        """Return the runs that are now decided. Joined over all calls, they are everything that was fed."""
        if self.is_over:
            return [(_TEXT, text)]
        self._held += text
        runs: list[TextRun] = []
        while self._advance(runs):
            pass
        return runs

    def flush(self) -> list[TextRun]:
        """End the output. An unfinished thought loses line breaks and a partial tag at its end."""
        runs: list[TextRun] = []
        self._take(runs, _DROPPED if self.has_thought else _TEXT, len(self._held))
        return runs

    def _advance(self, runs: list[TextRun]) -> bool:
        """Proceed by one stage or one tag; False if that needs more text."""
        match self.stage:
            case Stage.AWAITED:
                self._hold_blanks(len(self._held) - len(self._held.lstrip(BLANKS)))
                for tag in self._first_tags:
                    if self._held.startswith(tag):
                        self._take(runs, _DROPPED, len(tag))
                        self.stage = Stage.OPENED if tag == self._start else Stage.CLOSED
                        self.has_thought = True
                        return True
                self._set_over_if(runs, not any(tag.startswith(self._held) for tag in self._first_tags))
            case Stage.OPENED:
                return self._open(runs)
            case Stage.INSIDE:
                return self._think(runs)
            case Stage.CLOSED:
                self._drop_blanks(runs, LINE_BREAKS)
                self._set_over_if(runs, bool(self._held))
        return False

    def _open(self, runs: list[TextRun]) -> bool:
        self._drop_blanks(runs, LINE_BREAKS)
        if self._held.startswith(self._start):  # some models repeat what the template wrote
            self._take(runs, _DROPPED, len(self._start))
            return True
        if self._label and self._held.startswith(self._label):
            self._take(runs, _DROPPED, len(self._label))
            self._label = ""
            return True
        if any(word.startswith(self._held) for word in (self._start, self._label)):
            return False
        self.stage = Stage.INSIDE
        return True

    def _think(self, runs: list[TextRun]) -> bool:
        places = {self._held.find(tag): tag for tag in (self._start, self._end)}
        places.pop(-1, None)
        num_partial = 0 if places else partial_match_len(self._held, (self._start, self._end))
        place = min(places, default=len(self._held) - num_partial)
        tag = places.get(place, "")
        thought = self._held[:place] if tag == self._start else self._held[:place].rstrip(LINE_BREAKS)
        if thought or tag == self._start:
            self._take(runs, _REASONING, len(thought))
        num_blanks = place - len(thought)
        if not tag:
            self._hold_blanks(num_blanks)
            return False
        self._take(runs, _DROPPED, num_blanks + len(tag))
        self.stage = Stage.CLOSED if tag == self._end else Stage.INSIDE
        return True

    def _drop_blanks(self, runs: list[TextRun], blanks: str) -> None:
        self._take(runs, _DROPPED, len(self._held) - len(self._held.lstrip(blanks)))

    def _set_over_if(self, runs: list[TextRun], is_text: bool) -> None:
        if is_text:
            self.stage = Stage.OVER
            self._take(runs, _TEXT, len(self._held))

    def _hold_blanks(self, num_chars: int) -> None:
        if num_chars:
            self._blanks.append(self._held[:num_chars])
            self._held = self._held[num_chars:]

    def _take(self, runs: list[TextRun], kind: PartKind, num_chars: int) -> None:
        """Emit `num_chars` held characters, with the white space before them."""
        if text := "".join((*self._blanks, self._held[:num_chars])):
            runs.append((kind, text))
            self._blanks.clear()
            self._held = self._held[num_chars:]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A Splitting for one request's responses.

    stage: the stage at the end of its prompt. is_closed: the prompt has closed a thought, which may be empty, and an
    answer comes next.
    """

    tags: ReasoningTags
    stage: Stage
    is_closed: bool = False

    @classmethod
    def after(cls, prompt_token_ids: Sequence[int], tags: ReasoningTags, tokenizer: Tokenizer) -> Self:
        """Determine the stage from the prompt's last turn: the tokens after its last special token.

        A chat template's prompt ends with the beginning of the assistant's message. Tags in earlier messages do not
        count, and a tag that a user wrote consists of other tokens (see chat_template.py).
        """
        inner = {tokenizer.id_of(word) for word in _INNER_TOKENS}
        special = tokenizer.special_token_ids - marks_of(tags).keys() - inner
        places = range(len(prompt_token_ids) - 1, -1, -1)
        last = next((place for place in places if prompt_token_ids[place] in special), None)
        opener = None if last is None else prompt_token_ids[last]
        text = _spelling(prompt_token_ids if last is None else prompt_token_ids[last + 1 :], tags, tokenizer)
        start, end = (START_MARK, END_MARK) if tags.are_tokens else (tags.start, tags.end)
        opened, closed = text.rfind(start), text.rfind(end)
        if opened < 0 and closed < 0:
            return cls(tags, Stage.AWAITED)
        # A tag made of letters could be a user's text, unless a special token begins this turn.
        is_own = tags.are_tokens or opener not in (None, *tokenizer.edge_token_ids)
        if closed > opened:
            is_answered = bool(text[closed + len(end) :].strip(BLANKS))
            return cls(tags, Stage.OVER if is_answered else Stage.AWAITED, is_closed=is_own and not is_answered)
        thought = text[opened + len(start) :].strip(BLANKS)
        if thought in ("", tags.label):
            return cls(tags, Stage.OPENED)
        return cls(tags, Stage.INSIDE if is_own else Stage.AWAITED)

    def splitter(self) -> PartSplitter:
        """Make a splitter for one choice. It expects marks for tags that are tokens."""
        tags, marks = self.tags, marks_of(self.tags)
        start, end = (START_MARK, END_MARK) if marks else (tags.start, tags.end)
        thoughts = ReasoningSplitter(start, end, self.stage, marks, label=tags.label, may_end_first=tags.may_end_first)
        answer = tags.answer
        if answer is None:
            return thoughts
        is_closed = self.is_closed or not answer.follow_thoughts
        return ChainedSplitter(thoughts, AnswerSplitter(answer, lambda: thoughts.has_thought or is_closed))


def marks_of(tags: ReasoningTags) -> dict[int, str]:
    """Token id -> mark; empty for tags that are not tokens."""
    return {tags.start_ids[0]: START_MARK, tags.end_ids[0]: END_MARK} if tags.are_tokens else {}


def _spelling(token_ids: Sequence[int], tags: ReasoningTags, tokenizer: Tokenizer) -> str:
    """Return the text of tokens, with marks for tags that are tokens."""
    marks = marks_of(tags)
    texts, spelled = [], bytearray()
    for token_id in token_ids:
        if token_id in marks:
            texts += [spelled.decode(errors="replace"), marks[token_id]]
            spelled.clear()
        else:
            spelled += tokenizer.token_bytes(token_id)
    return "".join((*texts, spelled.decode(errors="replace")))
