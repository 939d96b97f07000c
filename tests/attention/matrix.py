"""Writes docs/attention-matrix.md from a real run: each feature on each backend of a GPU.

    python -m tests.attention.matrix --output docs/attention-matrix.md

With `--rows sinks`, only rows that this expression matches are run; the others stay as they are.
A case is a rig's run of prompts, chunks, a prefix hit, decodes and mixed steps, all of them checked
against a float64 softmax. An entry is the provider of the kernels and the largest error of any
sequence in any step: the norm of the difference over the norm of the reference.
"""

import argparse
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from attention.abstract import AttentionBackend, AttentionParams, AttentionType
from attention.selector import select_backend
from tests.attention.gpu_steps import (
    BLOCK_SIZES,
    FEATURES,
    HEAD_COUNTS,
    HEAD_SIZES,
    check_replays,
    gpu_rig,
    heads_of,
    run_steps,
)
from tests.attention.rig import TOLERANCE, Rig

BACKENDS = ("flashinfer", "xformers", "torch_sdpa", "hybrid")
_TYPES = (AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the document."""

    section: str
    name: str
    layers: tuple[AttentionParams, ...]
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    run: Callable[[Rig], None] = run_steps
    backends: tuple[str, ...] = BACKENDS


def main() -> int:
    """Run every case, write the document, and return 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=re.compile, help="expression of the names of rows to run")
    options = parser.parse_args()
    before = [] if options.rows is None else options.output.read_text().splitlines()
    lines, num_failed = [], 0
    section = ""
    with torch.inference_mode():
        for case in cases():
            if case.section != section:
                section = case.section
                lines += ["", f"## {section}", "", *_table_head()]
            if options.rows is not None and not options.rows.search(case.name):
                lines.append(_line_of(before, case))
                continue
            results = [_result(case, backend) for backend in BACKENDS]
            num_failed += sum(result.startswith("FAILED") for result in results)
            lines.append(f"| {case.name} | {' | '.join(results)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    head = _preamble(num_failed)
    if options.rows is not None:
        head = _amended(before, options.rows.pattern, num_failed)
    options.output.write_text("\n".join([*head, *lines]) + "\n")
    return 1 if num_failed else 0


def cases() -> Iterator[Case]:
    """Yield every row of the document."""
    plain = FEATURES["plain"]
    for dtype in (torch.bfloat16, torch.float16):
        for name, params in FEATURES.items():
            yield Case(
                section=f"Features, {_name(dtype)}", name=name, layers=(params,), dtype=dtype
            )
    only_sdpa = ("torch_sdpa",)
    for name, params in FEATURES.items():
        yield Case(
            section="Features, float32",
            name=name,
            layers=(params,),
            dtype=torch.float32,
            backends=only_sdpa,
        )
    section = "Attention types (encoder, decoder and cross attention in one model)"
    for name in ("plain", "scale", "cap", "sinks", "e4m3"):
        layers = tuple(replace(FEATURES[name], attention_type=kind) for kind in _TYPES)
        yield Case(section=section, name=name, layers=layers)
    section = "Encoders without a decoder"
    for name in ("plain", "scale", "window", "cap", "window+cap", "alibi", "window+alibi"):
        layer = replace(FEATURES[name], attention_type=AttentionType.ENCODER_ONLY)
        yield Case(section=section, name=name, layers=(layer,), run=run_encoders)
    section = "Layers that differ"
    for names in (("window", "plain", "window+cap", "plain"), ("window+sinks", "sinks") * 2):
        layers = tuple(FEATURES[name] for name in names)
        yield Case(section=section, name=", ".join(names), layers=layers)
    for heads in HEAD_COUNTS:
        yield Case(
            section="Query heads per KV head", name=heads, layers=(heads_of(heads, 64, "plain"),)
        )
    for size in HEAD_SIZES:
        yield Case(section="Head sizes", name=str(size), layers=(heads_of("3", size, "plain"),))
    for size in BLOCK_SIZES:
        yield Case(section="Block sizes", name=str(size), layers=(plain,), block_size=size)
    section = "Captured graphs, replayed over a block's end with padding"
    for name in ("plain", "window", "cap", "alibi", "sinks", "window+sinks", "e4m3"):
        params = FEATURES[name]
        other = replace(plain, kv_cache_dtype=params.kv_cache_dtype)
        yield Case(section=section, name=name, layers=(params, other), run=_no_steps)


def run_encoders(rig: Rig) -> None:
    """Run texts of several lengths; the rig checks each."""
    for lengths in ((9, 9, 1), (150, 3, 64)):
        rig.step(prefills=[(rig.sequence(), n) for n in lengths], num_padding=2)


def _no_steps(rig: Rig) -> None:
    """Leave the checks to the replays."""


def _result(case: Case, name: str) -> str:
    if name not in case.backends:
        return "rejected: 16 bits only"
    try:
        if case.run is _no_steps:
            return _replayed(case, _backend(case, name))
        rig = gpu_rig(
            *case.layers,
            backend=_backend(case, name),
            dtype=case.dtype,
            block_size=case.block_size,
        )
        case.run(rig)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"FAILED {str(error).partition(chr(10))[0][:80]}"
    return f"{_providers(rig)}, {rig.worst_error:.1e}"


def _replayed(case: Case, backend: type[AttentionBackend]) -> str:
    check_replays(backend, *case.layers, dtype=case.dtype, block_size=case.block_size)
    return "equal to eager steps"


def _backend(case: Case, name: str) -> type[AttentionBackend]:
    rig_spec = Rig.spec_of(
        *case.layers, dtype=case.dtype, block_size=case.block_size, device="cuda"
    )
    return select_backend(name, rig_spec)


def _providers(rig: Rig) -> str:
    """Return the provider, or each provider and its parts of a step."""
    parts: dict[str, dict[str, None]] = {}
    for kernels in rig.builder.kernels:
        for part, provider in kernels.providers.items():
            # Without a cache every prefill is ragged, and with an fp8 cache none is.
            has_part = kernels.params.kv_cache_dtype == "auto" or part != "prefill_ragged"
            if has_part if kernels.params.is_cached else part == "prefill_ragged":
                parts.setdefault(provider, {})[part] = None
    if len(parts) == 1:
        return next(iter(parts))
    return ", ".join(f"{provider} ({'+'.join(names)})" for provider, names in parts.items())


def _line_of(document: list[str], case: Case) -> str:
    """Return the line of a row in a document that was written before."""
    first = document.index(f"## {case.section}")
    return next(line for line in document[first:] if line.startswith(f"| {case.name} |"))


def _amended(document: list[str], rows: str, num_failed: int) -> list[str]:
    """Return the head of a document that was written before, with a line about some rows."""
    head = document[: next(i for i, line in enumerate(document) if line.startswith("## ")) - 1]
    mark = f"Rows with `{rows}`: "
    about = f"{mark}{_where()}. {_verdict(num_failed)}"
    return [*(line for line in head if not line.startswith(mark)), about]


def _table_head() -> list[str]:
    return [f"| | {' | '.join(BACKENDS)} |", "| --- |" + " --- |" * len(BACKENDS)]


def _preamble(num_failed: int) -> list[str]:
    limits = ", ".join(f"{_name(dtype)} {limit:g}" for dtype, limit in TOLERANCE.items())
    return [
        "# Features and accuracy of the attention backends",
        "",
        "Written by `python -m tests.attention.matrix --output docs/attention-matrix.md` on",
        f"{_where()}. {_verdict(num_failed)}",
        "",
        "A case runs whole prompts, chunks, a prefix hit, decodes, mixed steps and padding, and",
        "compares every sequence of every step with a float64 softmax over the cache.",
        "It names the provider, a library or the shared kernels (`attention/kernels/triton`),",
        "and the largest error: the norm of the difference over the norm of the reference.",
        f"Limits: {limits}. Scales of fp8 caches are not 1.",
    ]


def _where() -> str:
    return f"{datetime.now(UTC).date()}: {torch.cuda.get_device_name()}, {_versions()}"


def _verdict(num_failed: int) -> str:
    return "Every case passed." if not num_failed else f"{num_failed} cases FAILED."


def _versions() -> str:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("triton", "flashinfer-python", "xformers"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} absent")
    return ", ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
