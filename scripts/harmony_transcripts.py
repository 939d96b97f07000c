"""Write harmony_transcripts.json of the tests: turns of gpt-oss, as openai-harmony reads them.

    TIKTOKEN_ENCODINGS_BASE=FOLDER python -m scripts.harmony_transcripts

It needs the package openai-harmony, and FOLDER with o200k_base.tiktoken of OpenAI.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import openai_harmony

_OUTPUT = Path(__file__).parents[1] / "tests" / "serving" / "tools" / "harmony_transcripts.json"
_NUM_TRANSCRIPTS = 60
_TEXTS = (
    "Look at <b> first.",
    "It is 5 < 6 |> 7.",
    "h\u00e9llo \u4f60\u597d \U0001f642",
    "a\n\nb",
    "to=functions.look is no call",
)
_ARGUMENTS = ('{"where": "a<|b"}', "{}", '{"deep": true, "where": "\u4f60"}', '{"x": {"y": [1]}}')
_CALL_HEADERS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    "<|channel|>analysis to=functions.{} <|constrain|>json<|message|>",
)


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    encoding = openai_harmony.load_harmony_encoding(
        openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
    )
    generator = random.Random(0)
    written: list[dict[str, object]] = []
    for _ in range(_NUM_TRANSCRIPTS):
        text = _transcript(generator)
        tokens = encoding.encode(text, allowed_special="all")
        messages = encoding.parse_messages_from_completion_tokens(
            tokens, openai_harmony.Role.ASSISTANT
        )
        written.append({"text": text, "messages": [_message(one) for one in messages]})
    _OUTPUT.write_text(json.dumps(written, indent=1) + "\n")


def _transcript(generator: random.Random) -> str:
    """Return what a model writes after `<|start|>assistant`, without the token that ends it."""
    messages = [
        f"<|channel|>analysis<|message|>{generator.choice(_TEXTS)}"
        for _ in range(generator.choice((0, 1, 1, 2)))
    ]
    if generator.random() < 0.3:
        messages.append(f"<|channel|>commentary<|message|>{generator.choice(_TEXTS)}")
    if generator.random() < 0.5:
        header = generator.choice(_CALL_HEADERS).format(generator.choice(("look", "add")))
        messages.append(header + generator.choice(_ARGUMENTS))
    else:
        messages.append(f"<|channel|>final<|message|>{generator.choice(_TEXTS)}")
    return "<|end|><|start|>assistant".join(messages)


def _message(message: openai_harmony.Message) -> dict[str, str | None]:
    (content,) = message.content
    assert isinstance(content, openai_harmony.TextContent)
    return {
        "channel": message.channel,
        "recipient": message.recipient,
        "content": content.text,
    }


if __name__ == "__main__":
    main()
