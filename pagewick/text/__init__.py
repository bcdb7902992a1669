"""Text in, token ids out, and back: tokenizer, chat template, detokenizer, output stream. No torch, no engine."""
