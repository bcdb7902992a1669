"""Parts of `pagewick serve`."""
