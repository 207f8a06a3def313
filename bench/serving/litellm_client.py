"""litellm, unmodified, against a server: chat (plain and streamed) and text completion. Prints one JSON line.

python bench/serving/litellm_client.py BASE_URL MODEL
"""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm


def main() -> None:
    base_url, model = sys.argv[1:3]
    common = {"api_base": base_url, "api_key": "none", "max_tokens": 12, "temperature": 0}
    messages = [{"role": "user", "content": "Write a Python function `close`: Close the file."}]
    plain = litellm.completion(model=f"openai/{model}", messages=messages, **common)
    hosted = litellm.completion(model=f"hosted_vllm/{model}", messages=messages, **common)
    pieces = litellm.completion(model=f"openai/{model}", messages=messages, stream=True, **common)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="def close(", **common)
    try:
        litellm.completion(model=f"openai/{model}", messages=messages, **{**common, "max_tokens": 10**6})
        refused = "nothing"
    except litellm.ContextWindowExceededError:
        refused = "ContextWindowExceededError"
    same = plain.choices[0].message.content == hosted.choices[0].message.content == streamed
    facts = {"chat": streamed, "all_forms_agree": same, "text": text.choices[0].text, "too_long": refused}
    print(json.dumps(facts | {"completion_tokens": plain.usage.completion_tokens}))


if __name__ == "__main__":
    main()
