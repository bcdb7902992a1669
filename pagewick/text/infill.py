"""Prompts that ask a code model for the text between a prefix and a suffix ("fill in the middle")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from pagewick.text.control_tokens import CUT, Cutter
from pagewick.text.tokenizer import Tokenizer

# The infill tokens before the prefix, before the suffix, and before the middle, which the model writes.
KNOWN_INFILL_TOKENS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("<PRE>", "<SUF>", "<MID>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", None),  # Mistral: the suffix first, and the middle goes on from the prefix
)
# The tokens before the name of a repository and before each of its files (https://arxiv.org/pdf/2409.12186).
KNOWN_REPOSITORY_TOKENS: Final = (
    ("<|repo_name|>", "<|file_sep|>"),  # Qwen
    ("<repo_name>", "<file_sep>"),  # StarCoder 2
)
# The model reads some name of the repository and of the file that it writes, which clients do not send.
_REPOSITORY, _FILE = "repository\n", "file\n"


class OtherFile(NamedTuple):
    """Another file of the project, or a part of one."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Infill:
    """Asks for the text between prefix and suffix. others: files that it may depend on.

    beginning: how the text begins; the model goes on from there.
    """

    prefix: str
    suffix: str
    others: Sequence[OtherFile] = ()
    beginning: str = ""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens of a model for this. repository_ids: those before the repository and each file; None: it has none.

    If middle_id is None, the suffix precedes the prefix in the prompt.
    """

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    repository_ids: tuple[int, int] | None = None

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Self | None:
        """Find the infill tokens in the vocabulary; None if it has none."""
        for names in KNOWN_INFILL_TOKENS:
            ids = [None if name is None else tokenizer.id_of(name) for name in names]
            prefix_id, suffix_id, middle_id = ids
            if prefix_id is not None and suffix_id is not None and (middle_id is None) == (names[2] is None):
                return cls(prefix_id, suffix_id, middle_id, _repository_ids(tokenizer))
        return None

    def prompt(self, infill: Infill, tokenizer: Tokenizer, *, max_len: int | None) -> list[int]:
        """Return the prompt for a text. Control tokens in the texts around it are read as plain text.

        Raises ContextLengthError, InvalidRequestError as Tokenizer.encode does.
        """
        cutter = Cutter([text for text, is_special in tokenizer.added_tokens.items() if is_special])

        def encode(text: str, *, is_behind: bool = False) -> list[int]:
            """is_behind: a control token stands before the text, so that it gets no space of its own."""
            first = ("",) if is_behind else ()
            return tokenizer.encode_pieces([*first, *cutter.cut(text).split(CUT)], max_len=max_len)

        before = [self.prefix_id, *encode(infill.prefix)]
        after = [self.suffix_id, *encode(infill.suffix, is_behind=True)]
        middle = encode(infill.beginning, is_behind=True) if infill.beginning else []
        others: list[int] = []
        if infill.others and self.repository_ids is not None:
            repository_id, file_id = self.repository_ids
            others += [repository_id, *encode(_REPOSITORY, is_behind=True)]
            for one in infill.others:
                others += [file_id, *encode(f"{one.name}\n{one.text}\n", is_behind=True)]
            others += [file_id, *encode(_FILE, is_behind=True)]
        elif infill.others:
            others += encode("".join(f"{one.text}\n" for one in infill.others))
        begin = [*tokenizer.start_token_ids, *others]
        if self.middle_id is None:
            return [*begin, *after, *before, *middle]
        return [*begin, *before, *after, self.middle_id, *middle]


def _repository_ids(tokenizer: Tokenizer) -> tuple[int, int] | None:
    for names in KNOWN_REPOSITORY_TOKENS:
        repository_id, file_id = map(tokenizer.id_of, names)
        if repository_id is not None and file_id is not None:
            return repository_id, file_id
    return None
