"""The built-in model: a tiny Qwen3 checkpoint that knows about Pagewick. Its training code is not in the wheel."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""Directory of the built-in checkpoint (`config.json`, `model.safetensors`, `tokenizer.json`, ...)."""
