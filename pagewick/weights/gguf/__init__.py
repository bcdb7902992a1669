"""GGUF files: their headers, and their tensors and metadata under Hugging Face's names."""
