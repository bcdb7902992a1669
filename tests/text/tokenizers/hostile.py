"""Texts that expose differences between tokenizers, and a short text for training them."""

import random
import unicodedata

# Latin with marks, scripts without spaces, right to left, code, runs of everything.
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, 1234567890 times; it's what they'll've done.",
    "Grüße, naïve café: déjà vu! Ærøskøbing, Łódź, Ďábelské ódy.",
    "你好，世界。今天天气很好，我们去公园。 日本語のテキストと한국어 문장.",
    "مرحبا بالعالم، كيف حالك اليوم؟ שלום עולם! Привет, мир; Здравствуйте.",
    "def function(self, x: int) -> int:\n    if x <= 1:\n        return 1\n\treturn x ** 2  # done\n\n\n",
    "😀 👍🏽 👩‍👩‍👧 🇩🇪 and ☃️; x² + y² = ½",
    'for (int i = 0; i < 10; i++) {\r\n  printf("%d\\n", i);\r\n}\r\n',
)
CORPUS = [*_SENTENCES, "  ".join(_SENTENCES), "hello hello world  world   the then there theses and sand hand"] * 4

_SPECIAL = (
    "<s>", "</s>", "<unk>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<think>", "<|end|>",
    "<|assistant|>", "<start_of_turn>", "[gMASK]", "<sop>", "<|endoftext|>", "<｜User｜>", "<｜begin▁of▁sentence｜>",
)  # fmt: skip

HOSTILE = [
    "",
    " ",
    "    ",
    "hello",
    " hello",
    "  hello   world    ",
    "It's they'LL we'Ve 'tis IT'S",
    "tab\tand\t\ttabs \t mixed",
    "line\nline\n\nline\n\n\n\nline\r\nline\r\n\r\n \n \n",
    *_SENTENCES,
    "👩‍👩‍👧👨🏿‍🚀🏳️‍🌈👍🏽❤️‍🔥🇩🇪🇫",
    "㊗️ ａｂｃ ﬁ ① ™ ½ Ⅳ",
    unicodedata.normalize("NFC", "Å é ỗ Ǖ 각 ñ"),
    unicodedata.normalize("NFD", "Å é ỗ Ǖ 각 ñ"),
    "z̷̡̢̛a̴l̶g̸o̵ \u0301 alone",
    "\u202emixed \u200f rtl\u202c مرحبا 123 abc",
    "\x00",
    "a\x00b\x07c\x7fd\x1b[31me\x85f",
    "\ufeffBOM and \ufffe\uffff \ufdd0 \ufffd",
    "zero\u200bwidth\u2060joiner\u00a0nbsp\u3000ideographic\u2028line\u2029paragraph",
    "a" * 300,
    "ab" * 150 + "é" * 70 + "你" * 70,
    "1 12 123 1234 12345 123456 3.14159 1,000,000 0x1F ١٢٣ ²³",
    " " * 37 + "x" + " " * 24 + "y" + "\t" * 9 + "\n" * 5,
    "▁raw▁▁block <0x41> <0xZZ> Ġ Ċ ĉ",
    "``quoted'' -- ‘x’ “y” … —",
    "\U00010348\U0010ffff\U0001f9ff",
    *_SPECIAL,
    "x".join(_SPECIAL),
    " " + " \n ".join(_SPECIAL) + "  ",
    "<|im_start|>user\n<|im_end|> <|im_ start|> <|im_start|",
]

_ALPHABET = [*"aehlost  \n\t12.'_▁<>|é你😀\u0301\r", "<s>", "</s>", "<|end|>", "<|im_end|>", "<think>", "the", "ll"]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Strategy for short texts that mix the critical characters and special tokens."""
    rng = random.Random(seed)
    return ["".join(rng.choices(_ALPHABET, k=rng.randint(1, 24))) for _ in range(count)]
