"""How text is split into words before its bytes are merged, by the names that GGUF files use (tokenizer.ggml.pre).

The expressions are those of the models' own tokenizer.json; llama.cpp's (llama-vocab.cpp) are adapted from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

_ENDINGS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_WORDS: Final = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35_WORDS: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER_WORDS: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words with spaces between them may be one token.
_EXAONE_WORDS: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM_WORDS: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LLAMA3_WORDS: Final = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_AFTER: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS: Final = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_AFTER}"
_GPT4O_WORDS: Final = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_AFTER}"
)
_CJK_RUNS: Final = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
    r"|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
)
_YOUTU: Final = (
    _CJK_RUNS,
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}|{_AFTER}",
)
# Threes of digits, counted from the end of a number.
_TINY_AYA: Final = (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O_WORDS)
_UPPER_NOT_HAN: Final = rf"[{_UPPER[1:-1]}&&[^\p{{Han}}]]"
_LOWER_NOT_HAN: Final = rf"[{_LOWER[1:-1]}&&[^\p{{Han}}]]"
_KIMI_WORDS: Final = (
    rf"\p{{Han}}+|{_BEFORE}{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_ENDINGS}?"
    rf"|{_BEFORE}{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_REST}"
)
_DEEPSEEK_LETTERS: Final = (
    r"\s?["
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}"
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}"
    r"\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}"
    r"\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}"
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}"
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}"
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
    r"]+"
)
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    _DEEPSEEK_LETTERS,
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
)
_DEEPSEEK_CODER: Final = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_FALCON: Final = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]")
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """expressions: each splits what the ones before it have left, and their matches are words.

    ignores_merges: a word that is in the vocabulary is one token, whatever the merges. begins_with_bos: unless the file
    says otherwise.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    begins_with_bos: bool = False
    normalizer: normalizers.Normalizer | None = None

    def make(self) -> pre_tokenizers.PreTokenizer:
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(expression), "isolated") for expression in self.expressions
        ]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2: Final = PreTokenizer((GPT2_WORDS,))
_DIGITS: Final = PreTokenizer((r"\p{N}", GPT2_WORDS))
_LLAMA3: Final = PreTokenizer((_LLAMA3_WORDS,), ignores_merges=True, begins_with_bos=True)
_QWEN2: Final = PreTokenizer((QWEN2_WORDS,), normalizer=normalizers.NFC())

_QWEN2_PLAIN: Final = PreTokenizer((QWEN2_WORDS,))
_GPT4O: Final = PreTokenizer((_GPT4O_WORDS,))
_GLM4: Final = PreTokenizer((_LLAMA3_WORDS,), ignores_merges=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "mellum", "a.x-4.0", "gigachat", "exaone4"), _GPT2),
    **dict.fromkeys(("jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "exaone", "mellum2"), _DIGITS),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3_WORDS,))),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    "qwen2": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35_WORDS,)),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), _QWEN2_PLAIN),
    # Ling's expression is spelled otherwise, and matches the same words.
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2", "bailingmoe", "bailingmoe2"), _QWEN2_PLAIN),
    # Lines, and the words in them.
    "laguna": PreTokenizer((r"[^\n]+|\n+", QWEN2_WORDS)),
    # K-EXAONE.
    "exaone-moe": PreTokenizer((_EXAONE_WORDS,)),
    "seed-coder": PreTokenizer((_SEED_CODER_WORDS,)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), PreTokenizer(_DEEPSEEK_V3)),
    "kimi-k2": PreTokenizer((_KIMI_WORDS,)),
    "tekken": PreTokenizer((_TEKKEN_WORDS,), ignores_merges=True, begins_with_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer(_TINY_AYA)),
    "youtu": PreTokenizer(_YOUTU, ignores_merges=True),
    "falcon": PreTokenizer(_FALCON),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM_WORDS,))),
    "viking": PreTokenizer((_BLOOM_WORDS, r"\p{N}")),
}
# Names in files of encoders, which are read and not written.
ENCODER_PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "roberta-bpe": _GPT2,
    "modern-bert": PreTokenizer((GPT2_WORDS,), normalizer=normalizers.NFC()),
}
