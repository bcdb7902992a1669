"""Documents to examples: token ids, and which of them are learnt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from training.batches import UNLEARNT, Example
from training.corpus import Document, Segment, render
from training.vocabulary import encode_all

_USER = "<|im_start|>user\n"
_SHARES_OF_CUT_WORDS = (0.0, 0.0, 0.1, 0.3)


def _cut_words(segments: list[Segment], rng: random.Random) -> list[Segment]:
    """Sometimes cut a prompt inside words: the tokenizer then shows these words in other pieces, as rare words and
    misspellings do, and the network learns that both mean the same."""
    pieces: list[Segment] = []
    for segment in segments:
        text = segment.text
        start = text.rfind(_USER)
        share = rng.choice(_SHARES_OF_CUT_WORDS)
        if not segment.is_supervised and start >= 0 and share > 0:
            first, last = start + len(_USER), text.find("<|im_end|>", start)
            places = [i for i in range(first + 2, last - 1) if text[i - 1].isalpha() and text[i].isalpha()]
            previous = 0
            for place in places:
                # A word of five letters has four places.
                if rng.random() < share / 4:
                    pieces.append(Segment(text[previous:place], False))
                    previous = place
            text = text[previous:]
        pieces.append(Segment(text, segment.is_supervised))
    return pieces


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Document], max_length: int, rng: random.Random | None = None
) -> list[Example]:
    """Examples of at most `max_length` tokens. With `rng`, some prompts are cut inside words."""
    rendered = [render(document) for document in documents]
    if rng is not None:
        rendered = [_cut_words(segments, rng) for segments in rendered]
    flat = [segment for segments in rendered for segment in segments]
    encoded = iter(encode_all(tokenizer, [segment.text for segment in flat]))
    examples: list[Example] = []
    for segments in rendered:
        token_ids: list[int] = []
        labels: list[int] = []
        for segment in segments:
            ids = next(encoded)
            token_ids += ids
            labels += ids if segment.is_supervised else [UNLEARNT] * len(ids)
        examples.append(Example(token_ids[:-1][:max_length], labels[1:][:max_length]))
    return examples
