"""`python -m pagewick.vllm_rs.server`: vllm.rs's server, which is `pagewick serve` with the same flags."""

from pagewick.vllm_rs.__main__ import main

if __name__ == "__main__":
    main("serve")
