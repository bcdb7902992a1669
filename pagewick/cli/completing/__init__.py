"""Parts of `pagewick complete`: files of prompts and batches of requests."""
