"""`python -m pagewick.vllm_rs.chat`: vllm.rs's chat, which is `pagewick chat` with the same flags."""

from pagewick.vllm_rs.__main__ import main

if __name__ == "__main__":
    main("chat")
