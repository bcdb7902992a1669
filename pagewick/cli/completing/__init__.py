"""What `pagewick complete` is made of beyond a few prompts: files of prompts and batches of requests."""
