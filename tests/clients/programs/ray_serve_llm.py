"""Ray's own LLM application with our server class: models, completions, streams, chat, schemas."""

import json
import os
import secrets
import socket
import sys

# Otherwise Ray writes a token to the home directory, and listens on another interface.
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import openai
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

NAME = "tiny"
PROMPT = "class Queue:"
MESSAGES = [{"role": "user", "content": "What does Queue.put do?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def main(url: str, folder: str) -> None:
    ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=4)
    try:
        check(f"http://127.0.0.1:{start(folder)}/v1", url)
    finally:
        serve.shutdown()
        ray.shutdown()


def start(folder: str) -> int:
    """Start the application; return its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = LLMConfig(
        model_loading_config={"model_id": NAME, "model_source": folder},
        server_cls="pagedray:PagedRayLLM",
        # vLLM's names of options.
        engine_kwargs={
            "dtype": "float",
            "max_model_len": 512,
            "tensor_parallel_size": 1,
            "enable_prefix_caching": True,
            "device": "cpu",
            "executor": "local",
        },
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}), name="llm")
    return port


def check(url: str, plain_url: str) -> None:
    """Compare answers with those of `pagedray serve`."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    plain = openai.OpenAI(base_url=f"{plain_url}/v1", api_key="none", max_retries=0)
    assert NAME in [model.id for model in client.models.list()]
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "logprobs": 2}
    whole = client.completions.create(model=NAME, **asked)
    expected = plain.completions.create(model="tiny-llama", **asked)
    assert whole.choices[0].text == expected.choices[0].text, whole
    assert whole.choices[0].logprobs.tokens == expected.choices[0].logprobs.tokens
    assert whole.usage.total_tokens == expected.usage.total_tokens
    chunks = client.completions.create(model=NAME, **asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    answer = client.chat.completions.create(model=NAME, **asked)
    expected = plain.chat.completions.create(model="tiny-llama", **asked)
    assert answer.choices[0].message.content == expected.choices[0].message.content, answer
    chunks = client.chat.completions.create(model=NAME, **asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    structure = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    written = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=120, response_format=structure
    )
    assert set(json.loads(written.choices[0].message.content)) == {"city"}
    check_rejection(client)


def check_rejection(client: openai.OpenAI) -> None:
    """Ask for what is not supported."""
    try:
        client.completions.create(model=NAME, prompt=PROMPT, extra_body={"logprobs": 21})
    except openai.BadRequestError as error:
        if "logprobs" in str(error):
            return
    raise AssertionError("logprobs = 21 was not rejected")


if __name__ == "__main__":
    main(*sys.argv[1:])
