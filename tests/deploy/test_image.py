"""The files that the Dockerfile copies exist and are complete, and versions match.

Without a container runtime: hadolint reads the file, and the wheel is built from the files that the
builder would get, by the commands that it would run. `make image-test` builds the image itself.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PACKAGES = ("attention", "cluster", "pagedray", "workers")
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _instructions() -> Iterator[tuple[str, list[str]]]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, shlex.split(rest)


def _stage(name: str) -> list[tuple[str, list[str]]]:
    """Return the instructions of one stage."""
    found: list[tuple[str, list[str]]] = []
    current = None
    for instruction, words in _instructions():
        if instruction == "FROM":
            current = words[-1]
        elif current == name:
            found.append((instruction, words))
    assert found
    return found


def _copied_from_checkout() -> Iterator[str]:
    for instruction, words in _instructions():
        if instruction == "COPY" and not words[0].startswith("--from="):
            yield from words[:-1]


def _is_sent(path: Path) -> bool:
    """Return whether a file is sent to the builder: the last matching pattern decides."""
    is_ignored = False
    names = [str(path), *(str(parent) for parent in path.parents)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        if any(
            fnmatch(name, pattern) or fnmatch(f"/{name}", pattern.replace("**", "*"))
            for name in names
        ):
            is_ignored = not line.startswith("!")
    return not is_ignored


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (one.relative_to(ROOT) for one in path.rglob("*") if one.is_file())
    else:
        yield path.relative_to(ROOT)


def test_hadolint_reports_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), "--format", "json", "--failure-threshold", "style", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert json.loads(done.stdout) == []


def test_copied_files_exist_and_are_sent() -> None:
    sources = sorted(set(_copied_from_checkout()))
    assert set(PACKAGES) < set(sources)
    for source in sources:
        found = [one for one in _files(ROOT / source) if "__pycache__" not in one.parts]
        assert found, f"{source} is not in the checkout"
        assert all(_is_sent(one) for one in found), f"{source} is kept back by .dockerignore"


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", "tests/fakes.py", "README.rst"]
)
def test_nothing_else_is_sent(path: str) -> None:
    assert not _is_sent(Path(path))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of the image, built from the files that the stage copies."""
    source = tmp_path_factory.mktemp("source")
    for instruction, words in _stage("wheel"):
        if instruction == "COPY":
            for one in words[:-1]:
                for file in _files(ROOT / one):
                    if _is_sent(file):
                        (source / file).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", "wheels", "."],
        cwd=source,
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
    )
    [path] = (source / "wheels").iterdir()
    return zipfile.ZipFile(path)


def test_the_wheel_has_all_packages(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(file)
        for package in PACKAGES
        for file in _files(ROOT / package)
        if "__pycache__" not in file.parts
    }
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == expected
    assert {"pagedray/py.typed", "attention/kernels/cpu/paged_decode.c"} <= inside


def test_the_wheel_has_the_command_and_the_license(wheel: zipfile.ZipFile) -> None:
    info = f"pagedray-{_PROJECT['version']}.dist-info"
    assert "pagedray = cluster.cli.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_an_unprivileged_user_and_stops_cleanly(target: str) -> None:
    stage = dict(_stage(target))
    assert stage["USER"] == ["10001:10001"]
    assert stage["STOPSIGNAL"] == ["SIGTERM"]
    assert stage["ENTRYPOINT"] == ["[tini,", "--,", "pagedray,", "serve]"]
    assert "http://127.0.0.1:8000/health]" in stage["HEALTHCHECK"]
    assert stage["ARG"] == [f"VERSION={_PROJECT['version']}"]
    assert stage["LABEL"][-1] == "org.opencontainers.image.version=${VERSION}"
    # Only files are copied from other stages, not their compilers and pip.
    assert not [words for name, words in _stage(target) if name == "RUN"]


def _bases() -> dict[str, str]:
    arguments = (words[0] for name, words in _instructions() if name == "ARG")
    pairs = (argument.split("=", 1) for argument in arguments if "_BASE=" in argument)
    return dict(pairs)


def test_base_images_have_exact_versions() -> None:
    bases = _bases()
    assert len(bases) == 2
    for base in bases.values():
        assert re.search(r":\d+\.\d+", base)


def test_both_images_have_the_python_of_one_release_of_ubuntu() -> None:
    # Ray compares the Python of a node with the head's, patch level included.
    releases = {base.partition("ubuntu")[2].lstrip(":") for base in _bases().values()}
    assert releases == {"24.04"}
    for stage in ("builder", "cpu-base", "cuda-base"):
        assert any("python3" in words for name, words in _stage(stage) if name == "RUN")
    assert "on Python 3.12." in (ROOT / "deploy" / "constraints-cuda.txt").read_text()


@pytest.mark.parametrize("extras", [["tracing"], ["gpu", "tracing"]])
def test_requirements_are_those_of_the_project(extras: list[str]) -> None:
    printed = subprocess.run(
        [sys.executable, "deploy/image/requirements.py", *extras],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout.splitlines()
    more = [line for name in extras for line in _PROJECT["optional-dependencies"][name]]
    assert printed == [*_PROJECT["dependencies"], *more]


def test_the_cuda_image_has_the_versions_that_the_tests_run_with() -> None:
    ours, cuda = (_pins(ROOT / name) for name in ("constraints.txt", "deploy/constraints-cuda.txt"))
    # Required by the torch that was benchmarked on GPUs.
    follows_torch = {"torch", "triton", "setuptools"}
    different = {name for name in ours.keys() & cuda.keys() if ours[name] != cuda[name]}
    assert different <= follows_torch
    extras = _PROJECT["optional-dependencies"]
    for line in (*_PROJECT["dependencies"], *extras["gpu"], *extras["tracing"]):
        name = re.split(r"[\[<>=;! ]", line)[0].lower()
        assert name in cuda, f"run deploy/image/constraints_cuda.py: {name} is missing"


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
