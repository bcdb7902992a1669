"""LoRA adapters on this disk or on a hub: PEFT's directories and llama.cpp's GGUF files."""
