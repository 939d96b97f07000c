"""instructor: an answer in each mode, and a stream of its parts."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

ASKED = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": "What does Queue.put do?"}],
    "max_tokens": 200,
    "max_retries": 0,
    "temperature": 0,
}


class Answer(BaseModel):
    """What the model is to answer."""

    size: Literal["small", "large"]
    is_empty: bool


def main(url: str, folder: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        answer = client.chat.completions.create(response_model=Answer, **ASKED)
        assert isinstance(answer, Answer), (mode, answer)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    partial = list(client.chat.completions.create_partial(response_model=Answer, **ASKED))
    assert partial[-1].model_dump() == answer.model_dump()


if __name__ == "__main__":
    main(*sys.argv[1:])
