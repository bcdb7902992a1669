"""Ask the server a question with the openai package, once in one piece and once as a stream.

pagewick serve --port 2000
python3 examples/openai_client.py
"""

from __future__ import annotations

import argparse
import sys

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask an OpenAI-compatible server a question.")
    parser.add_argument("--url", default="http://localhost:2000/v1/", help="base URL of the server")
    parser.add_argument("--question", default="What is Pagewick?")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    try:
        with openai.OpenAI(base_url=arguments.url, api_key="EMPTY") as client:
            ask(client, arguments.question, arguments.max_tokens)
    except openai.APIConnectionError:
        sys.exit(f"error: no server answers at {arguments.url}; start one, or give its --url")
    except openai.APIError as error:
        sys.exit(f"error: {error.message}")


def ask(client: openai.OpenAI, question: str, max_tokens: int) -> None:
    model = client.models.list().data[0].id
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    completion = client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens)
    print(completion.choices[0].message.content)

    # The session_id keeps the conversation's part of the prefix cache until its next request.
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"session_id": "my-conversation"},
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
