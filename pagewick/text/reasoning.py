"""Reasoning: the tags that a model puts around its thoughts, and what of its output is thought.

    <think>\\nIt is a sum.\\n</think>\\n\\nFour.        reasoning: "It is a sum."   text: "Four."

Only a thought at the very beginning of an answer counts. Many chat templates write the opening tag themselves, so
whether an answer begins inside a thought is for the prompt's end to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from pagewick.outputs import PartKind
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tokenizer import Tokenizer

# Before a thought, and after one that the prompt closed.
BLANKS = " \t\r\n"
# Looked up once: see outputs.py.
_TEXT, _REASONING, _DROPPED = PartKind.TEXT, PartKind.REASONING, PartKind.DROPPED
# Around a tag, dropped with it.
LINE_BREAKS = "\r\n"

# The first that a model has is its own. gpt-oss and Gemma 4, which speak in channels, are not among them.
KNOWN_TAGS = (
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, MiniMax, Kimi, Nemotron, Phi, OLMo and most others
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|think|>", "<|/think|>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE
    ("<reasoning>", "</reasoning>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL
)
# What tags that are tokens of their own stand for while an output is split. No decoded text has a lone surrogate.
START_MARK, END_MARK = "\ud800", "\ud801"


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """A model's tags, as text and as the tokens that write them where a text goes on.

    are_tokens: each is a token of its own, added to the vocabulary for this; the same letters in other tokens are text.
    """

    start: str
    end: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    are_tokens: bool

    @classmethod
    def find(cls, tokenizer: Tokenizer, templates: Iterable[str]) -> Self | None:
        """The tags of a model: known ones that its chat template mentions, else such as its vocabulary has."""
        sources = list(templates)
        added = tokenizer.added_tokens
        mentioned = [tags for tags in KNOWN_TAGS if any(tag in source for source in sources for tag in tags)]
        for start, end in (*mentioned, *(tags for tags in KNOWN_TAGS if added.keys() >= {*tags})):
            start_ids, end_ids = (tuple(tokenizer.encode_pieces(["", tag])) for tag in (start, end))
            are_tokens = added.keys() >= {start, end} and len(start_ids) == len(end_ids) == 1
            return cls(start, end, start_ids, end_ids, are_tokens)
        return None


class Stage(IntEnum):
    """How far an answer has got. What comes, where nothing but white space or line breaks has come yet:
    AWAITED: a thought or the answer. OPENED: the thought. CLOSED: the answer after a thought.
    """

    AWAITED = 0
    OPENED = 1
    INSIDE = 2
    CLOSED = 3
    OVER = 4


# What was read, and what it is.
TextRun = tuple[PartKind, str]


class ReasoningSplitter:
    """A PartSplitter that tells thoughts from the answer.

    start, end: the tags, or what they are fed as, by `marks`. stage: where the prompt ends. has_thought: whether there
    is a thought, be it an empty one.
    """

    def __init__(self, start: str, end: str, stage: Stage, marks: Mapping[int, str] | None = None) -> None:
        self.marks = marks or {}
        self.stage = stage
        self.has_thought = stage in (Stage.OPENED, Stage.INSIDE)
        self._start = start
        self._end = end
        # White space of which the next word says what it is, and what may become a tag. The white space may be very
        # long, so that nothing is to read it again.
        self._blanks: list[str] = []
        self._held = ""

    @property
    def is_over(self) -> bool:
        """Whether everything from here on is text."""
        return self.stage == Stage.OVER

    @property
    def kind(self) -> PartKind | None:
        """Line breaks behind a thought are of the thought; what comes before one may be either."""
        if self.stage == Stage.OVER:
            return _TEXT
        return _REASONING if self.has_thought else None

    def feed(self, text: str) -> list[TextRun]:
        """What is now known: runs that, joined over all calls, are everything that was fed."""
        if self.is_over:
            return [(_TEXT, text)]
        self._held += text
        runs: list[TextRun] = []
        while self._advance(runs):
            pass
        return runs

    def flush(self) -> list[TextRun]:
        """The output is over. An unfinished thought loses the line breaks and the part of a tag at its end."""
        runs: list[TextRun] = []
        self._take(runs, _DROPPED if self.has_thought else _TEXT, len(self._held))
        return runs

    def _advance(self, runs: list[TextRun]) -> bool:
        """Go on by one stage or one tag; False if it takes more text for that."""
        match self.stage:
            case Stage.AWAITED:
                return self._await(runs)
            case Stage.OPENED:
                return self._open(runs)
            case Stage.INSIDE:
                return self._think(runs)
            case Stage.CLOSED:
                self._drop_blanks(runs, LINE_BREAKS)
                self._set_over_if(runs, bool(self._held))
        return False

    def _await(self, runs: list[TextRun]) -> bool:
        self._hold_blanks(len(self._held) - len(self._held.lstrip(BLANKS)))
        if self._held.startswith(self._start):
            self._take(runs, _DROPPED, len(self._start))
            self.stage, self.has_thought = Stage.OPENED, True
            return True
        self._set_over_if(runs, not self._start.startswith(self._held))
        return False

    def _open(self, runs: list[TextRun]) -> bool:
        self._drop_blanks(runs, LINE_BREAKS)
        if self._held.startswith(self._start):  # some models repeat what the template wrote
            self._take(runs, _DROPPED, len(self._start))
            return True
        if self._start.startswith(self._held):
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
        """Give out so many characters, with the white space before them."""
        if text := "".join((*self._blanks, self._held[:num_chars])):
            runs.append((kind, text))
            self._blanks.clear()
            self._held = self._held[num_chars:]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one request's answers are to be split. stage: where its prompt ends."""

    tags: ReasoningTags
    stage: Stage

    @classmethod
    def after(cls, prompt_token_ids: Sequence[int], tags: ReasoningTags, tokenizer: Tokenizer) -> Self:
        """As the prompt's last turn has it: what follows its last special token.

        A chat template's prompt ends with what opens the assistant's message; a tag in an earlier message is of no
        meaning, and one that a user wrote is not made of the same tokens (see chat_template.py).
        """
        turn, opener = _last_turn(prompt_token_ids, tags, tokenizer)
        text = _spelling(turn, tags, tokenizer)
        start, end = (START_MARK, END_MARK) if tags.are_tokens else (tags.start, tags.end)
        opened, closed = text.rfind(start), text.rfind(end)
        if opened < 0 and closed < 0:
            return cls(tags, Stage.AWAITED)
        if closed > opened:
            return cls(tags, Stage.OVER if text[closed + len(end) :].strip(BLANKS) else Stage.AWAITED)
        thought = text[opened + len(start) :].strip(BLANKS)
        if not thought:
            return cls(tags, Stage.OPENED)
        # Tags that are mere letters could be a user's, if nothing shows that this turn is the assistant's alone.
        is_own = tags.are_tokens or opener not in (None, *tokenizer.edge_token_ids)
        return cls(tags, Stage.INSIDE if is_own else Stage.AWAITED)

    def splitter(self) -> ReasoningSplitter:
        """A splitter for one choice; it is fed marks where tags are tokens."""
        if self.tags.are_tokens:
            return ReasoningSplitter(START_MARK, END_MARK, self.stage, marks_of(self.tags))
        return ReasoningSplitter(self.tags.start, self.tags.end, self.stage)


def marks_of(tags: ReasoningTags) -> dict[int, str]:
    """Token id -> mark; empty for tags that are no tokens."""
    return {tags.start_ids[0]: START_MARK, tags.end_ids[0]: END_MARK} if tags.are_tokens else {}


def _last_turn(
    prompt_token_ids: Sequence[int], tags: ReasoningTags, tokenizer: Tokenizer
) -> tuple[Sequence[int], int | None]:
    """The tokens after the last special one that is no tag, and that one; None if there is none."""
    special = tokenizer.special_token_ids - marks_of(tags).keys()
    for place in range(len(prompt_token_ids) - 1, -1, -1):
        if prompt_token_ids[place] in special:
            return prompt_token_ids[place + 1 :], prompt_token_ids[place]
    return prompt_token_ids, None


def _spelling(token_ids: Sequence[int], tags: ReasoningTags, tokenizer: Tokenizer) -> str:
    """The text of tokens, with marks for tags that are tokens."""
    marks = marks_of(tags)
    texts, spelled = [], bytearray()
    for token_id in token_ids:
        if token_id in marks:
            texts += [spelled.decode(errors="replace"), marks[token_id]]
            spelled.clear()
        else:
            spelled += tokenizer.token_bytes(token_id)
    return "".join((*texts, spelled.decode(errors="replace")))
