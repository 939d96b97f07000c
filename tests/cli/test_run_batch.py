"""`pagedray run-batch`: the batch format of OpenAI, with the results of the HTTP API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from cluster.cli.commands import main
from pagedray import LLM, SamplingParams
from pagedray.version import __version__
from tests.cli.loads_server import serving

TINY_LLAMA = str(Path(__file__).parents[2] / "examples" / "tiny-llama")
FLAGS = ("--device=cpu", "--dtype=float32")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "class Queue:"


# Any: JSON values, here and below.
def line(number: int, url: str, **body: Any) -> str:
    return json.dumps(
        {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}
    )


def run(folder: Path, lines: list[str], *flags: str) -> list[dict[str, Any]]:
    """Return the results of a batch."""
    given, written = folder / "in.jsonl", folder / "out.jsonl"
    given.write_text("\n".join(lines))
    # As with vLLM.
    files = ["-i", str(given), "-o", str(written)]
    assert main(["run-batch", *files, "--model", TINY_LLAMA, *FLAGS, *flags]) == 0
    return [json.loads(one) for one in written.read_text().splitlines()]


def test_results_are_those_of_the_http_api_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = {"role": "user", "content": "What does open do?"}
    greedy = {"max_tokens": 4, "temperature": 0}
    results = run(
        tmp_path,
        [
            line(0, TEXT, model="tiny-llama", prompt=PROMPT, **{**greedy, "max_tokens": 64}),
            line(1, CHAT, model="tiny-llama", messages=[message], **greedy),
            "",
            line(2, TEXT, prompt=PROMPT, **greedy),
            line(3, TEXT, model="other", prompt=PROMPT),
            line(4, TEXT, prompt=PROMPT, temprature=0),
            line(5, CHAT, messages=[message], max_tokens=5000),
            line(6, "/v1/embeddings", input=PROMPT),
            line(7, "/v1/responses", input=PROMPT, max_output_tokens=4),
        ],
    )
    assert [one["custom_id"] for one in results] == [f"request-{n}" for n in range(8)]
    statuses = [one["response"]["status_code"] for one in results]
    assert statuses == [200, 200, 200, 404, 400, 400, 400, 200]
    assert len({one["id"] for one in results}) == 8
    with LLM(TINY_LLAMA, executor="local", device="cpu", dtype="float32") as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        (text,) = llm.generate([PROMPT], params, use_tqdm=False)
        (reply,) = llm.chat([message], params, use_tqdm=False)
    bodies = [one["response"]["body"] for one in results]
    assert bodies[2]["choices"][0]["text"] == text.outputs[0].text
    assert bodies[1]["choices"][0]["message"]["content"] == reply.outputs[0].text
    assert bodies[0]["usage"]["completion_tokens"] == 64
    assert results[0]["error"] is None
    assert results[4]["error"] == bodies[4]["error"]
    assert "did you mean temperature?" in results[4]["error"]["message"]
    written = f"Wrote 8 results to {tmp_path / 'out.jsonl'}, of which 4 failed.\n"
    assert written in capsys.readouterr().err


def test_a_queue_that_is_full_delays_requests_and_names_are_those_given(tmp_path: Path) -> None:
    lines = [line(n, TEXT, model="gpt-x", prompt=f"{n}", max_tokens=2) for n in range(40)]
    flags = ("--max-queued-requests=2", "--max-num-seqs=2", "--served-model-name=gpt-x")
    results = run(tmp_path, lines, *flags)
    assert [one["response"]["status_code"] for one in results] == 40 * [200]
    assert [one["custom_id"] for one in results] == [f"request-{n}" for n in range(40)]


def test_texts_are_embedded_and_scored_in_batches(tmp_path: Path) -> None:
    lines = [line(0, "/v1/embeddings", input=[PROMPT, "b"]), line(1, CHAT, messages=[])]
    embedded, chat = run(tmp_path, lines, "--task=embed")
    assert len(embedded["response"]["body"]["data"]) == 2
    assert chat["response"]["status_code"] == 400


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "in.jsonl has no requests."),
        (["{"], "in.jsonl, line 1: "),
        (["\xff"], "in.jsonl, line 1: "),
        (["[]"], "in.jsonl, line 1: Expected `object`, got `array`."),
        ([line(0, TEXT), "", "1"], "in.jsonl, line 3: Expected `object`, got `int`."),
        (['{"custom_id": "a"}'], "line 1: Object missing required field `url`."),
        (['{"url": "/v1/completions", "body": {}}'], "missing required field `custom_id`"),
        (['{"custom_id": 1, "url": "/v1/completions", "body": {}}'], "Expected `str`, got `int`"),
        (['{"custom_id": "a", "url": "/v1/completions", "body": ""}'], "`$.body`."),
        (
            [line(0, TEXT).replace("POST", "GET")],
            "line 1: method must be POST, not 'GET'.",
        ),
        ([line(0, "/v1/models")], "line 1: url must be one of /v1/chat/completions, /v1/compl"),
        ([line(0, TEXT), line(1, "/v1/audio/transcriptions")], "line 2: url must be one of"),
        ([line(0, TEXT, stream=True)], "line 1: body.stream must be false"),
        ([line(0, TEXT), line(1, TEXT), line(0, TEXT)], "line 3: custom_id 'request-0' is also"),
    ],
)
def test_mistakes_in_the_file_are_found_before_the_model_is_loaded(
    tmp_path: Path, lines: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "in.jsonl"
    given.write_bytes("\n".join(lines).encode("latin-1"))
    written = tmp_path / "out.jsonl"
    assert main(["run-batch", "absent", "-i", str(given), "-o", str(written)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not written.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("-i", "absent.jsonl", "-o", "out"), "Cannot read --input-file absent.jsonl: No such"),
        (("-i", "{file}", "-o", "/absent/out"), "Cannot write --output-file /absent/out: No such"),
    ],
)
def test_files_that_cannot_be_opened_are_named(
    tmp_path: Path, files: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text(line(0, TEXT))
    words = [one.format(file=given) for one in files]
    assert main(["run-batch", TINY_LLAMA, *words, *FLAGS]) == 2
    assert message in capsys.readouterr().err


def test_a_bug_report_has_versions_hardware_and_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for name in ("HF_TOKEN", "PAGEDRAY_API_KEY"):
        monkeypatch.setenv(name, "sk-secret-value")
    info = b'{"model": "org/m", "max_num_seqs": 256, "sampling_defaults": {"top_p": 0.5}}'
    with serving(b"", info=info) as (url, received):
        assert main(["collect-env", f"--url={url}"]) == 0
    printed = capsys.readouterr().out
    for line in (
        *(
            f"  pagedray: {__version__}",
            f"  torch: {torch.__version__}",
            f"  ray: {ray.__version__}",
        ),
        *("  CPU: ", "  memory: ", "  RAY_ADDRESS: 10.0.0.1:6379", "  HF_TOKEN: (set)"),
        *("  model: org/m", "  max_num_seqs: 256", '  sampling_defaults: {"top_p":0.5}'),
    ):
        assert f"\n{line}" in printed
    assert "secret" not in printed
    assert received == [("/server_info", "Bearer sk-secret-value")]


def test_no_server_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--url=http://127.0.0.1:1"]) == 0
    error = "no information: Cannot reach the server at 127.0.0.1:1: Connection refused."
    assert error in capsys.readouterr().out
