"""What `pip install -e` makes of `pyproject.toml`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

from tests.system.server_process import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_program_beside_a_checkout_imports_its_package(tmp_path: Path) -> None:
    checkout, installed = tmp_path / "pagedray", tmp_path / "installed"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for package in ("attention", "cluster", "pagedray", "workers"):
        (checkout / package).mkdir()
        (checkout / package / "__init__.py").write_text("")
    build = "from setuptools import build_meta; build_meta.build_editable('.')"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    (wheel,) = checkout.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    program = f"import site; site.addsitedir({str(installed)!r}); import pagedray; print(pagedray)"
    # Without the packages of this environment, one of which is a real `pagedray`.
    found = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, check=True, capture_output=True, env={}
    )
    assert str(checkout / "pagedray" / "__init__.py") in found.stdout.decode()
