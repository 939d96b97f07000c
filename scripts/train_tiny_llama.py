"""Train examples/tiny-llama on the sources and docstrings of Python's standard library.

    python scripts/train_tiny_llama.py --minutes 52 --compile

The text is the standard library of the interpreter that runs the script. Files are held out from
the tokenizer and the model by a hash of their names. `--minutes` decides the number of steps; runs
with equal `--seed` and `--steps` give equal results.
"""

import argparse
import ast
import hashlib
import inspect
import json
import math
import random
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
VOCAB_SIZE = 3072
MAX_POSITIONS = 1024
# Most steps run on short sequences, because long ones are slow on a CPU. The decay, the last fifth
# of the steps and twice as slow, trains the later positions.
SHORT_SEQUENCE = 256
TOKENS_PER_STEP = 4096
STABLE_TIME_SHARE = 2 / 3
PEAK_LEARNING_RATE = 2e-3
NUM_WARMUP_STEPS = 100
SAVE_INTERVAL_S = 240.0
LIBRARY = Path(sysconfig.get_path("stdlib"))
SKIPPED_FOLDERS = {"encodings", "idlelib", "idle_test", "site-packages", "test", "tests"}
MAX_ANSWER_LENGTH = 1200
QUESTIONS = (
    "What does {name} do?", "What is {name}?", "What is {name} for?", "Explain {name}.",
    "Tell me about {name}.", "How do I use {name}?", "Describe {name}.",
)  # fmt: skip
CODE_REQUESTS = ("Show the source of {name}.", "Write the function {name}.", "Implement {name}.")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def library_files() -> list[str]:
    """Return the path of every source file to learn from, relative to the standard library."""
    files = sorted(path.relative_to(LIBRARY).as_posix() for path in LIBRARY.rglob("*.py"))
    kept = (file for file in files if not SKIPPED_FOLDERS.intersection(file.split("/")))
    # The build configuration names folders of one machine.
    return [file for file in kept if not file.startswith("_sysconfig")]


def is_held_out(file: str) -> bool:
    """Return whether a file, named relative to the standard library, is excluded from training."""
    return hashlib.sha256(file.encode()).digest()[0] % 20 == 7


def chat_document(question: str, answer: str) -> str:
    """Return one exchange as the chat template renders it."""
    return f"{ROLES[1]}\n{question}{END_OF_TURN}\n{ROLES[2]}\n{answer}{END_OF_TURN}\n"


def shorten(text: str) -> str:
    """Return the leading paragraphs of a text that fit an answer."""
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) > MAX_ANSWER_LENGTH:
            break
        kept += ("\n\n" if kept else "") + paragraph
    return kept[: 2 * MAX_ANSWER_LENGTH]


def walk_documented(node: Documented, name: str) -> Iterator[tuple[str, Documented]]:
    """Yield a module and the functions and classes in it with their dotted names."""
    yield name, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from walk_documented(child, f"{name}.{child.name}")


def exchanges_about(file: str, source: str, rng: random.Random) -> Iterator[str]:
    """Yield questions and answers about the documented names of one file."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = source.splitlines()
    for name, node in walk_documented(ast.parse(source), module):
        short_name = name if isinstance(node, ast.Module) else name.removeprefix(module + ".")
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) > 30:
            for form, subject in zip(rng.sample(QUESTIONS, 2), (name, short_name), strict=True):
                yield chat_document(form.format(name=subject), shorten(docstring))
        if isinstance(node, ast.FunctionDef) and rng.random() < 0.3:
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if 150 < len(code) < MAX_ANSWER_LENGTH:
                request = rng.choice(CODE_REQUESTS).format(name=rng.choice((name, short_name)))
                yield chat_document(request, f"```python\n{code}\n```")


def help_topics(source: str, rng: random.Random) -> Iterator[str]:
    """Yield the pages of `help()`, parts of the language reference, alone and as answers."""
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    for topic, page in ast.literal_eval(assignment.value).items():
        text = inspect.cleandoc(page)
        yield text
        yield chat_document(rng.choice(QUESTIONS).format(name=f"{topic} in Python"), shorten(text))


def read_documents(files: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Return the sources of files, and the prose drawn from them, as two lists of documents."""
    sources: list[str] = []
    prose: list[str] = []
    for file in files:
        source = (LIBRARY / file).read_text(encoding="utf-8", errors="replace").strip() + "\n"
        if file == "pydoc_data/topics.py":
            prose.extend(help_topics(source, rng))
            continue
        sources.append(source)
        prose.extend(exchanges_about(file, source, rng))
    return sources, prose


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer fitted to the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, END_OF_TURN, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """Return documents as token ids, `[num_tokens]` int64, with a separator after each."""
    separator = tokenizer.token_to_id(END_OF_TEXT)
    token_ids = [separator]
    for encoding in tokenizer.encode_batch(documents):
        token_ids += [*encoding.ids, separator]
    return torch.tensor(token_ids)


def build_model() -> LlamaForCausalLM:
    """Return the model with random weights, float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=[0, 1],
    )
    return LlamaForCausalLM(config)


def save_tokenizer(tokenizer: Tokenizer, output: Path) -> None:
    """Write the tokenizer and its chat template to a folder."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [END_OF_TURN, *ROLES],
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def save_model(model: LlamaForCausalLM, output: Path) -> None:
    """Write the weights as bfloat16 and the configuration to a folder."""
    copy = build_model()
    copy.load_state_dict(model.state_dict())
    settings = {"bos_token_id": 0, "eos_token_id": [0, 1], "pad_token_id": 0}
    copy.generation_config = GenerationConfig.from_dict(settings)
    copy.bfloat16().save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)


def learning_rate(step: int, num_stable_steps: float, num_steps: float) -> float:
    """Return the rate of one step: a warm-up, a plateau and a cosine to nearly zero."""
    if step < num_stable_steps:
        return PEAK_LEARNING_RATE * min(1.0, (step + 1) / NUM_WARMUP_STEPS)
    progress = (step - num_stable_steps) / (num_steps - num_stable_steps)
    return PEAK_LEARNING_RATE * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)


def train(model: LlamaForCausalLM, tokens: torch.Tensor, arguments: argparse.Namespace) -> None:
    """Train for the given time or number of steps."""
    parameters = list(model.parameters())
    groups = [
        {"params": [weight for weight in parameters if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in parameters if weight.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(arguments.seed)

    def loss_of(windows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    forward = torch.compile(loss_of, dynamic=False) if arguments.compile else loss_of
    num_steps = arguments.steps or math.inf
    num_stable_steps = num_steps - num_steps // 5 if arguments.steps else math.inf
    start = last_save = time.monotonic()
    average_loss, step = math.log(VOCAB_SIZE), 0
    while step < num_steps:
        elapsed_s = time.monotonic() - start
        if num_steps == math.inf and elapsed_s > arguments.minutes * 60 * STABLE_TIME_SHARE:
            num_stable_steps, num_steps = step, step + max(1, step // 4)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_stable_steps, num_steps)
        length = SHORT_SEQUENCE if step < num_stable_steps else MAX_POSITIONS
        shape = (TOKENS_PER_STEP // length, 1)
        first = torch.randint(len(tokens) - length, shape, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(tokens[first + torch.arange(length + 1)])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average_loss += (loss.item() - average_loss) * max(0.02, 1 / (step + 1))
        step += 1
        if step % 50 == 0:
            print(f"{step}/{num_steps}: loss {average_loss:.3f}, {elapsed_s:.0f} s", flush=True)
        if time.monotonic() - last_save > SAVE_INTERVAL_S:
            save_model(model, arguments.output)
            last_save = time.monotonic()
    print(f"trained {step} steps, {step * TOKENS_PER_STEP} tokens")


@torch.inference_mode()
def evaluate(folder: Path, tokenizer: Tokenizer, documents: list[str]) -> str:
    """Return the loss of the saved bfloat16 model over the documents, in full windows, as text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = encode(tokenizer, documents)
    total = 0.0
    for first in range(0, len(tokens) - 1, MAX_POSITIONS):
        window = tokens[first : first + MAX_POSITIONS + 1]
        logits = model(input_ids=window[None, :-1]).logits[0].float()
        total += functional.cross_entropy(logits, window[1:], reduction="sum").item()
    num_bytes = sum(len(document.encode()) for document in documents)
    rates = total / (len(tokens) - 1), total / math.log(2) / num_bytes
    return "{:.3f} nats per token, {:.3f} bits per byte".format(*rates)


def main() -> None:
    """Train, save and evaluate the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=52.0, help="time to train")
    parser.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument("--output", type=Path, default=Path("examples/tiny-llama"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs g++)")
    arguments = parser.parse_args()
    # One thread, so that results do not depend on the number of cores.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    files = library_files()
    sources, prose = read_documents([file for file in files if not is_held_out(file)], rng)
    held_out = read_documents([file for file in files if is_held_out(file)], rng)
    documents = [*sources, *prose]
    rng.shuffle(documents)
    tokenizer = train_tokenizer(documents)
    save_tokenizer(tokenizer, arguments.output)
    tokens = encode(tokenizer, documents)
    model = build_model()
    print(f"{len(files)} files, {len(held_out[0])} held out; {len(tokens)} tokens", flush=True)
    train(model, tokens, arguments)
    save_model(model, arguments.output)
    for label, texts in zip(("sources", "exchanges"), held_out, strict=True):
        print(f"held-out {label}: {evaluate(arguments.output, tokenizer, texts)}", flush=True)


if __name__ == "__main__":
    main()
