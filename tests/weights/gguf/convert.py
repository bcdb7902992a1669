"""Write the files of MODELS with llama.cpp's converter: python -m tests.weights.gguf.convert LLAMA_CPP

LLAMA_CPP is the directory of llama.cpp's sources, as they also lie in vendor/ of llama-cpp-python's sources. The files
in `files/` were written with those of llama-cpp-python 0.3.36. The tokenizer is a stand-in: models are compared by ids.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.models.checkpoints import save
from tests.weights.gguf.models import FILES, MODELS, VOCAB_SIZE, original


def convert(name: str, directory: Path) -> bytes:
    """Return the float32 file of a model. directory: an empty one."""
    import gguf
    from conversion import get_model_class

    def set_vocab(converter: Any) -> None:
        writer = converter.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([f"t{token_id}" for token_id in range(VOCAB_SIZE)])
        writer.add_token_types([1] * VOCAB_SIZE)
        writer.add_token_merges(["t 0"])
        writer.add_eos_token_id(1)

    save(original(name), directory)
    # Gemma 3's converter cuts the embeddings to the tokenizer's size.
    vocabulary = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    base = get_model_class(architecture)
    converter = type(base.__name__, (base,), {"set_vocab": set_vocab, "model_arch": base.model_arch})
    path = directory / "model.gguf"
    converter(directory, gguf.LlamaFileType.ALL_F32, path).write()
    return path.read_bytes()


def main() -> None:
    sys.path += [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    for name in sys.argv[2:] or MODELS:
        with tempfile.TemporaryDirectory() as directory:
            compressed = lzma.compress(convert(name, Path(directory)), preset=9)
        (FILES / f"{name}.gguf.xz").write_bytes(compressed)
        print(name, len(compressed))


if __name__ == "__main__":
    main()
