"""`pagedray collect-env`: versions, hardware and settings, but no secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
import torch

from cluster.cli.commands import main
from pagedray.version import __version__
from tests.cli.loads_server import serving

if TYPE_CHECKING:
    import pytest


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
