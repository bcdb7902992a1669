"""Between messages and token ids: tokenizer, chat template, detokenizer, output stream. No torch, no
engine."""
