"""The settings of pip reach a build with the files that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.image.pip_settings import Mount, PipSettings

if TYPE_CHECKING:
    from pathlib import Path


def test_files_and_folders_are_mounted(tmp_path: Path) -> None:
    certificate, index = tmp_path / "proxy.pem", tmp_path / "index" / "simple"
    certificate.touch()
    index.mkdir(parents=True)
    settings = PipSettings.of(
        [
            f"global.cert='{certificate}'",
            f"global.find-links='{tmp_path}'",
            f"global.index-url='file://{index}'",
        ]
    )
    assert settings.text == (
        f"[global]\ncert = /run/pip/proxy.pem\nfind-links = {tmp_path}\nindex-url = file://{index}\n"
    )
    assert settings.mounts == (
        Mount(certificate, "/run/pip/proxy.pem"),
        Mount(tmp_path, str(tmp_path)),
        Mount(index.parent, str(index.parent)),
    )


def test_the_environment_wins() -> None:
    lines = [":env:.timeout='5'", "global.timeout='7'", "install.no-compile='true'"]
    assert PipSettings.of(lines).text == "[global]\ntimeout = 5\nno-compile = true\n"


def test_addresses_stay_as_they_are() -> None:
    lines = ["global.extra-index-url='https://one.example/simple file:///nowhere/simple'"]
    settings = PipSettings.of(lines)
    assert "https://one.example/simple\n    file:///nowhere/simple" in settings.text
    assert settings.mounts == ()
