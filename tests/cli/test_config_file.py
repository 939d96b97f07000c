"""`pagedray serve --config FILE`: flags of a YAML file, which the command line overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.cli.commands import main
from cluster.cli.config_file import apply_config
from cluster.cli.engine_flags import ignored_flags
from cluster.cli.parser import command_parser, make_parser

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

TEXT = """\
model: org/name
max_model_len: 32K
dtype: half
http-port: 8001
enforce-eager: true
enable-prefix-caching: false
allowed-hosts: [a.example, b.example]
api-key: [sk-12345678, sk-87654321]
num-blocks: null
trust-remote-code: false
"""


def parsed(path: Path, *arguments: str) -> argparse.Namespace:
    parser = command_parser(make_parser(), "serve")
    return parser.parse_args(apply_config(parser, [*arguments, "--config", str(path)]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "serve.yaml"
    found.write_text(TEXT)
    return found


def test_flags_of_the_file_are_as_on_the_command_line(path: Path) -> None:
    expected = command_parser(make_parser(), "serve").parse_args(
        [
            *("org/name", "--max-model-len=32K", "--dtype=half", "--http-port=8001"),
            *("--enforce-eager", "--no-enable-prefix-caching"),
            *("--allowed-hosts=a.example,b.example", "--api-key", "sk-12345678", "sk-87654321"),
            f"--config={path}",
        ]
    )
    assert vars(parsed(path)) == vars(expected)
    assert (expected.max_model_len, expected.dtype) == (32768, "float16")


def test_numbers_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    # As YAML reads them: 1.1, 5349, 2736 and 80.
    path.write_text(
        "served-model-name: 1.10\napi-key: [0012345, 45:36]\nmodel: 1_0\nhttp-port: 0080\n"
    )
    found = parsed(path)
    assert (found.served_model_name, found.api_key) == (["1.10"], ["0012345", "45:36"])
    assert (found.model, found.http_port) == ("1_0", 80)


def test_objects_may_be_mappings(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: m\nhf_overrides:\n  rope_scaling: {rope_type: yarn, factor: 4.0, name: '8'}\n"
        "  max_position_embeddings: 32768\n  list: [1, x, true]\n"
        "rope-theta: 1e6\nenable_lora: false\ntrust_remote_code: true\nswap-space: 4\n"
        "structured-outputs-config.backend: xgrammar\ncompilation-config: {mode: 3}\n"
    )
    found = parsed(path, "--async-scheduling", "--no-async-scheduling", "--model", "other")
    assert found.hf_overrides == {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "name": "8"},
        "max_position_embeddings": 32768,
        "list": [1, "x", True],
        "rope_theta": 1e6,
    }
    assert [*ignored_flags(found)] == [
        "trust_remote_code", "swap_space", "compilation_config", "async_scheduling"
    ]  # fmt: skip
    assert found.model == "other"
    assert parsed(path, "--hf-overrides", "{}").hf_overrides == {}


def test_the_command_line_has_priority(path: Path) -> None:
    own = ("--http_port", "9", "other", "--dtype=float32", "--api-key", "sk-abcdefgh")
    found = parsed(path, *own)
    assert (found.model, found.http_port, found.dtype) == ("other", 9, "float32")
    assert found.api_key == ["sk-abcdefgh"]
    assert found.max_model_len == 32768


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max-modl-len: 5",
            "max-modl-len is not a flag of pagedray serve; did you mean max-model-len?",
        ),
        ("config: x", "config is only allowed on the command line"),
        ("port: 1\nport: 2", "has port twice"),
        ("max-model-len: 1\nmax_model_len: 2", "has max-model-len twice"),
        ("dtype: int3", "argument --dtype: invalid choice: 'int3'"),
        ("http-port: yes", "http-port must be a value, not true"),
        ("http-port: {a: 1}", "http-port must be a value"),
        ("enforce-eager: 1", "enforce-eager must be true or false, not '1'"),
        ("pipeline-parallel-size: 2", "--pipeline-parallel-size is not supported"),
        ("enable-lora: true", "--enable-lora is not supported"),
        ("structured-outputs-config: {backend: outlines}", "structures are always compiled by"),
        ("structured-outputs-config.backend: outlines", "structures are always compiled by"),
        ("hf-overrides: 3", "must be a JSON object"),
        ("model: [a]", "model must be a folder or a Hub id"),
        ("served-model-name: [a, null]", "served-model-name must be a list of values, not null"),
        ("allowed-hosts: [no]", "allowed-hosts must be a list of values, not false"),
        ("allowed-hosts: &a [*a]", "allowed-hosts must be a list of values, not a list"),
        ("- a", "must have lines such as"),
        ("a: [", "not valid YAML: line 1, column 5: expected the node content, but found"),
        ("model: [1\n", "line 2, column 1: expected ',' or ']', but got '<stream end>' (see"),
        ("model: m\na: b: c", "line 2, column 5: mapping values are not allowed here (see"),
        ("\tport: 1", "line 1, column 1: found character '\\t' that cannot start any token"),
        ("model: m\nport: *b", "line 2, column 7: found undefined alias 'b'"),
        ('a: "\\q"', "line 1, column 6: found unknown escape character 'q'"),
        ("a: !!x 1", "line 1, column 4: could not determine a constructor for the tag"),
        ("a: 1\n---\nb: 2", "line 2, column 1: expected a single document in the stream, but"),
        ("? [a]\n: 1", "line 1, column 3: found unhashable key"),
        ('a: "b', "line 1, column 6: found unexpected end of stream"),
        ("\x00", "not valid YAML: unacceptable character #x0000: special characters are not"),
        ("a: !!python/object/apply:os.system [x]", "is not valid YAML"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["serve", "folder", f"--config={path}"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "folder", "--config", str(tmp_path / "absent.yaml")])
    text = "absent.yaml: No such file or directory (see pagedray serve --help)\n"
    assert capsys.readouterr().err.endswith(text)
