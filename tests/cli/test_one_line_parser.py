"""Commands without arguments print their help; mistyped ones are told which was meant."""

from __future__ import annotations

import pytest

from cluster.cli.commands import main


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        ("", "Start a server with an OpenAI-compatible"),
        ("keys", "Print a new API key"),
        ("bench", "Measure the latency of one batch"),
        ("deploy", "Check Helm values for errors"),
        ("completion", "{bash,tcsh,zsh}"),
    ],
)
def test_a_command_that_needs_a_choice_prints_its_help(
    command: str, listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(command.split())
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: pagedray {command}".rstrip())
    assert listed in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serv m", "pagedray: error: serv is not a command; did you mean serve?"),
        ("sreve m", "sreve is not a command; did you mean serve?"),
        ("server m", "server is not a command; did you mean serve?"),
        ("gen m x", "gen is not a command; did you mean generate?"),
        ("benchmark serve", "benchmark is not a command; did you mean bench?"),
        ("compl bash", "compl is not a command; did you mean complete or completion?"),
        ("Serve m", "Serve is not a command; did you mean serve?"),
        ("models", "models is not a command; choose from serve, generate, "),
        ("org/model", "did you mean pagedray serve org/model?"),
        ("bench serv", "pagedray bench: error: serv is not a command; did you mean serve?"),
        ("bench thru", "choose from latency, throughput, serve"),
        ("bench throughptu m", "did you mean throughput?"),
        ("deploy chek", "chek is not a command; did you mean check?"),
        ("keys create", "create is not a command; choose from new"),
    ],
)
def test_a_mistyped_command_is_told_which_was_meant(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "'" not in error


def test_a_wrong_value_of_an_argument_lists_the_allowed_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    assert "invalid choice: 'fish' (choose from" in capsys.readouterr().err
