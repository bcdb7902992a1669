"""`python -m pagewick.vllm_rs.completion`: vllm.rs's completion of prompts, which is `pagewick complete` with the same flags."""

from pagewick.vllm_rs.__main__ import main

if __name__ == "__main__":
    main("complete")
