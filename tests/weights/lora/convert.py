"""Write `files/` with PEFT and with llama.cpp's converter: python -m tests.weights.lora.convert LLAMA_CPP

LLAMA_CPP is the directory of llama.cpp's sources, as they also lie in vendor/ of llama-cpp-python's sources. The files
were written with PEFT 0.21.2 and the sources of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.models.checkpoints import write_checkpoint
from tests.models.lora_adapters import write_adapter

FILES = Path(__file__).parent / "files"
MODEL = "llama"
# Rows of queries and keys lie in another order in files of this model; the others lie as they are.
TARGETS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"]
# Models whose rows of attn_qkv lie in another order; each has a directory with its name.
BY_HEAD = {
    "pythia": ["gpt_neox.layers.1.attention.query_key_value", "gpt_neox.layers.1.attention.dense"],
    "falcon-40b": ["transformer.h.1.self_attention.query_key_value", "transformer.h.1.self_attention.dense"],
}


def write_both(llama_cpp: Path, model_name: str, directory: Path, names: list[str], **config: Any) -> None:
    """Write an adapter of PEFT into a directory, and the same one as a GGUF file."""
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        model = write_checkpoint(model_name, base)
        write_adapter(model, directory, names, seed=7, rank=2, lora_alpha=3, **config)
        for other in directory.glob("README*"):
            other.unlink()
        subprocess.run(
            [
                sys.executable, str(llama_cpp / "convert_lora_to_gguf.py"), "--base", str(base), "--outtype", "f32",
                "--outfile", str(directory / "adapter.gguf"), str(directory),
            ],
            check=True,
        )  # fmt: skip


def main(llama_cpp: Path) -> None:
    names = [f"model.layers.1.{target}" for target in TARGETS]
    write_both(llama_cpp, MODEL, FILES, names, alpha_pattern={"down_proj": 5})
    for name, changed in BY_HEAD.items():
        write_both(llama_cpp, name, FILES / name, changed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
