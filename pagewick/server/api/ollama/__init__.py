"""Ollama's API: chats, texts, embeddings, and the list of models that its clients read."""
