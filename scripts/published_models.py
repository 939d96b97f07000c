"""Write the table of published configuration files in docs/models.md.

python -m scripts.published_models
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pagedray.errors import CheckpointError
from workers.models.families.registry import read_model_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import ModelConfig

__all__ = [
    "PublishedFile",
    "document_with_table",
    "more_published_files",
    "published_files",
    "written_config",
]

_ROOT = Path(__file__).parent.parent
DOCUMENT = _ROOT / "docs" / "models.md"
_FOLDER = _ROOT / "tests" / "workers" / "models" / "families" / "published"
_MORE = _FOLDER.with_name("more_published.jsonl")
_BEGIN, _END = "<!-- published -->\n", "<!-- end of published -->"
_USES = {"generate": "text", "embed": "embeddings", "score": "scores"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A copy of the config.json of a published model."""

    name: str
    model: str
    source: str
    """Where the copy is from."""
    sha256: str | None
    """The digest of the published text, without the line break at its end, or None."""
    changed: str
    """What is known to differ from the published text; empty if nothing does."""
    config: dict[str, Any]  # Any: parsed JSON

    @property
    def digest(self) -> str:
        """The digest of this copy, as transformers would write it."""
        text = json.dumps(self.config, indent=2, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def published_files() -> list[PublishedFile]:
    """Return the files, by the name of their model."""
    files = [
        PublishedFile(name=path.stem, **json.loads(path.read_text()))
        for path in _FOLDER.glob("*.json")
    ]
    return sorted(files, key=lambda file: file.model.lower())


def more_published_files() -> list[PublishedFile]:
    """Return files that are only read, and not compared with transformers at full size."""
    lines = _MORE.read_text().splitlines()
    return [PublishedFile(**json.loads(line)) for line in lines]


def written_config(file: PublishedFile, folder: Path) -> Path:
    """Write a file as the config.json of a folder, and return the folder."""
    (folder / "config.json").write_text(json.dumps(file.config))
    return folder


def document_with_table(document: str) -> str:
    """Return the document with the table that the code gives."""
    before, _, rest = document.partition(_BEGIN)
    _, found, after = rest.partition(_END)
    assert found, "The document has no place for the table."
    return f"{before}{_BEGIN}{chr(10).join(_rows())}\n{_END}{after}"


def _rows() -> Iterator[str]:
    yield "| model | `architectures` | task and context |"
    yield "| --- | --- | --- |"
    for file in published_files():
        yield f"| {file.model} | `{file.config['architectures'][0]}` | {_result(file)} |"


def _result(file: PublishedFile) -> str:
    """Return what the model is loaded for, or why it is rejected."""
    with TemporaryDirectory() as name:
        folder = written_config(file, Path(name))
        try:
            return _use(read_model_config(folder))
        except CheckpointError as error:
            problem = str(error).removeprefix(f"{folder / 'config.json'}: ")
            return f"rejected: {problem.partition('. ')[0].rstrip('.')}"


def _use(config: ModelConfig) -> str:
    text = f"{_USES[config.task]}, {config.max_positions} tokens"
    if config.long_context is not None:
        text += f", or {config.long_context.max_positions} with `--max-model-len`"
    return text


def main() -> None:
    """Rewrite the document."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    DOCUMENT.write_text(document_with_table(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
