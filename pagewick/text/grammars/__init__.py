"""Grammars: which texts a response may be, and which tokens may therefore come next."""
