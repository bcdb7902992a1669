"""The model in the box: a tiny Qwen3 checkpoint that knows about Pagewick, its corpus and its training script."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""Directory of the built-in checkpoint (`config.json`, `model.safetensors`, `tokenizer.json`, ...)."""
