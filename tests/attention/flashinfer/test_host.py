"""What the FlashInfer backend decides and prepares on the host, without the library or a GPU."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.abstract import AttentionParams, AttentionSpec, AttentionType
from attention.gpu.batch import SubBatch
from attention.gpu.flashinfer_pages import PageUploader, plan_arguments
from attention.selector import FlashInferBackend, reason_for_shared, select_backend
from tests.attention.rig import params_of

CPU = torch.device("cpu")
SPEC = AttentionSpec(
    layers=(params_of(8, 2, 128),), dtype=torch.bfloat16, device=CPU, block_size=16
)


def rows_of(seq_lens: list[int], tables: list[list[int]]) -> SubBatch:
    """Return decodes of sequences with these keys."""
    ones = np.ones(len(seq_lens), dtype=np.int32)
    return SubBatch(
        first_token=0,
        num_tokens=len(seq_lens),
        query_lens=ones,
        host_seq_lens=np.array(seq_lens, dtype=np.int32),
        host_block_tables=np.array(tables, dtype=np.int32),
        query_starts=torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=max(seq_lens),
        has_no_context=False,
    )


def test_every_reason_for_a_rejection_is_given() -> None:
    reasons = " ".join(FlashInferBackend.check(replace(SPEC, dtype=torch.float32)))
    for part in ("device is cpu", "dtype is torch.float32"):
        assert part in reasons


def test_absent_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.gpu.backend.find_spec", lambda name: None)
    reasons = FlashInferBackend.check(SPEC)
    assert "the package flashinfer-python is not installed" in reasons
    assert "the package triton is not installed" in reasons


def test_selector_asks_without_loading_the_library() -> None:
    was_loaded = "flashinfer" in sys.modules
    with pytest.raises(ValueError, match=r"'flashinfer' does not support .*: .* torch_sdpa"):
        select_backend("flashinfer", SPEC)
    assert ("flashinfer" in sys.modules) == was_loaded


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (params_of(8, 2, 128), None),
        (params_of(7, 1, 64, sliding_window=5, soft_cap=2.0, scale=0.3), None),
        (params_of(8, 2, 256, fp8="fp8_e5m2"), None),
        (params_of(8, 2, 128, has_alibi=True), "ALiBi"),
        (params_of(8, 2, 80), "64, 128, 256 and not 80"),
        (params_of(8, 2, 64, attention_type=AttentionType.ENCODER), None),
        (params_of(8, 2, 64, attention_type=AttentionType.ENCODER_DECODER), None),
        (
            params_of(8, 2, 64, sliding_window=5, attention_type=AttentionType.ENCODER_ONLY),
            "a window on both sides",
        ),
    ],
)
def test_shared_kernels_serve_what_the_library_lacks(
    params: AttentionParams, reason: str | None
) -> None:
    given = reason_for_shared(params)
    assert (given is None) == (reason is None)
    assert reason is None or reason in str(given)


def test_plans_have_the_parameters_of_the_layers() -> None:
    params = params_of(8, 2, 128, sliding_window=5, soft_cap=2.0, scale=0.3)
    arguments = plan_arguments(params, SPEC, torch.float8_e4m3fn)
    assert arguments == {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "window_left": 4,
        "logits_soft_cap": 2.0,
        "sm_scale": 0.3,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.float8_e4m3fn,
    }


def test_pages_leave_padding_out() -> None:
    rows = rows_of([5, 0, 4, 1], [[7, 3, 9], [9, 9, 9], [2, 9, 9], [4, 9, 9]])
    pages = PageUploader(CPU, 4, is_graph=False).pages_of(rows)
    assert pages.starts.tolist() == [0, 2, 2, 3, 4]
    assert pages.last_lens.tolist() == [1, 0, 4, 1]
    assert pages.indices.tolist() == [7, 3, 2, 4]
    assert pages.graph is None


def test_pages_are_made_once_per_batch() -> None:
    uploader = PageUploader(CPU, 4, is_graph=False)
    prefills, decodes = rows_of([5], [[7, 3]]), rows_of([4], [[2, 9]])
    first, second = uploader.pages_of(prefills), uploader.pages_of(decodes)
    assert uploader.pages_of(prefills) is first
    assert uploader.pages_of(decodes) is second


def test_pages_of_a_graph_stay_where_they_are() -> None:
    uploader = PageUploader(CPU, 4, is_graph=True)
    empty = uploader.pages_of(rows_of([0, 0], [[0, 0], [0, 0]])).graph
    pages = uploader.pages_of(rows_of([8, 3], [[7, 3], [5, 0]]))
    assert empty is not None
    assert empty.starts.tolist() == pages.starts.tolist() == [0, 2, 3]
    assert empty.last_lens.tolist() == pages.last_lens.tolist() == [4, 3]
    assert empty.indices[:3].tolist() == pages.indices.tolist() == [7, 3, 5]
    assert len(empty.indices) == 4
