"""`python -m pagewick.vllm_rs.completion`: vllm.rs's completion, with the flags of `pagewick complete --chat`."""

from pagewick.vllm_rs.__main__ import main

if __name__ == "__main__":
    main("complete")
