"""Build the wheel and the sdist in dist/, try them in a new environment, write the notes.

    python -m scripts.release

The notes are the section of the version in CHANGELOG.md. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from pagedray.version import __version__

__all__ = ["check_contents", "notes_of"]

_ROOT = Path(__file__).parents[1]
_DIST = _ROOT / "dist"
_NEEDED = (
    "cluster/serving/admin/web/index.html",
    "cluster/serving/admin/web/page/vendor/LICENSE.highlight.txt",
    "cluster/serving/admin/web/page/vendor/LICENSE.marked.txt",
    "cluster/serving/admin/web/page/vendor/highlight.js",
    "cluster/serving/admin/web/page/vendor/marked.js",
    "pagedray/py.typed",
    "pagedray/v1/pagedray.proto",
    "pagedray/v1/pagedray_pb2.pyi",
)
_MODEL = _ROOT / "examples" / "tiny-llama"
_TRIAL = """
import importlib.resources
import pagedray
from pagedray import LLM, SamplingParams
assert "site-packages" in pagedray.__file__, pagedray.__file__
assert "service GenerationService" in (
    importlib.resources.files("pagedray.v1") / "pagedray.proto"
).read_text()
with LLM({model!r}, executor="local", device="cpu", show_progress=False) as llm:
    (found,) = llm.generate("class Queue:", SamplingParams(max_tokens=8), use_tqdm=False)
assert found.outputs[0].text
"""


def main() -> None:
    """Build, try, and write the notes."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    notes = notes_of((_ROOT / "CHANGELOG.md").read_text(), __version__)
    shutil.rmtree(_DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(_DIST), str(_ROOT))
    (wheel,) = _DIST.glob("*.whl")
    (sdist,) = _DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # What the sdist builds is what the checkout builds.
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps",
             "--disable-pip-version-check", "--wheel-dir", str(folder), str(sdist))  # fmt: skip
        (again,) = folder.glob("*.whl")
        check_contents(wheel)
        if _names(again) != _names(wheel):
            raise SystemExit(f"The sdist lacks {sorted(_names(wheel) ^ _names(again))}.")
        _try(wheel, folder)
    (_DIST / "notes.md").write_text(notes)
    print(f"{wheel.name}, {sdist.name} and notes.md are in {_DIST}.")


def notes_of(changelog: str, version: str) -> str:
    """Return the section of a version. Raises SystemExit if there is none."""
    section = f"\n{changelog}".partition(f"\n## {version}\n")[2].partition("\n## ")[0].strip()
    if not section:
        raise SystemExit(f"CHANGELOG.md has no section {version}.")
    return f"{section}\n"


def check_contents(wheel: Path) -> None:
    """Raise SystemExit if a wheel lacks files that are not modules."""
    missing = sorted(set(_NEEDED) - _names(wheel))
    if missing:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}.")


def _try(wheel: Path, folder: Path) -> None:
    """Install the wheel alone, and generate with it outside of the checkout."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--constraint", str(_ROOT / "constraints.txt"), str(wheel))  # fmt: skip
    _run(str(environment / "bin" / "pagedray"), "--version", folder=folder)
    _run(str(python), "-I", "-c", _TRIAL.format(model=str(_MODEL)), folder=folder)


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _run(*command: str, folder: Path = _ROOT) -> None:
    subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    main()
