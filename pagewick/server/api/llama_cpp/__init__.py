"""llama.cpp's own API, beside OpenAI's: completions, infilling, and what its server tells about itself."""
