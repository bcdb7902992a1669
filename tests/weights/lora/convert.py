"""Write `files/` with PEFT and with llama.cpp's converter: python -m tests.weights.lora.convert LLAMA_CPP

LLAMA_CPP is the directory of llama.cpp's sources, as they also lie in vendor/ of llama-cpp-python's sources. The files
were written with PEFT 0.21.2 and the sources of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.models.checkpoints import write_checkpoint
from tests.models.lora_adapters import write_adapter

FILES = Path(__file__).parent / "files"
MODEL = "llama"
# Rows of queries and keys lie in another order in files of this model; the others lie as they are.
TARGETS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"]


def main(llama_cpp: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        model = write_checkpoint(MODEL, base)
        names = [f"model.layers.1.{target}" for target in TARGETS]
        write_adapter(model, FILES, names, seed=7, rank=2, lora_alpha=3, alpha_pattern={"down_proj": 5})
        for other in FILES.glob("README*"):
            other.unlink()
        subprocess.run(
            [
                sys.executable, str(llama_cpp / "convert_lora_to_gguf.py"), "--base", str(base), "--outtype", "f32",
                "--outfile", str(FILES / "adapter.gguf"), str(FILES),
            ],
            check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
