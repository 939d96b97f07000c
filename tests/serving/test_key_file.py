"""Keys: generation, storage as digests, authentication, and reload when the file changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from cluster.serving.auth import ANONYMOUS, Authenticator, KeyFile, digest_of, new_key
from pagedray.errors import AuthenticationError, StartupError

if TYPE_CHECKING:
    from pathlib import Path

KEY, OTHER_KEY = new_key(), new_key()


def line(*keys: str) -> str:
    return "keys = [" + ", ".join(f'"sha256:{digest_of(key).hex()}"' for key in keys) + "]\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    text = f"[tenants.alice]\nweight = 2\nmax_requests = 3\nmax_tokens = 900\n{line(KEY)}"
    return written(
        tmp_path / "keys.toml", f"{text}[tenants.root]\nis_admin = true\n{line(OTHER_KEY)}"
    )


def test_keys_identify_tenants_and_their_limits(path: Path) -> None:
    authenticator = Authenticator(path)
    tenant = authenticator.authenticate(f"Bearer {KEY}")
    assert (tenant.name, tenant.weight, tenant.is_admin) == ("alice", 2.0, False)
    assert (tenant.max_requests, tenant.max_tokens) == (3, 900)
    assert authenticator.authenticate(f"bearer  {OTHER_KEY} ").is_admin
    assert authenticator.tenant_named("alice") == tenant


def test_new_keys_are_random_and_not_stored_in_the_file(path: Path) -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) >= 43
    assert KEY not in path.read_text()


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {digest_of(KEY).hex()}",
        f"Bearer sha256:{digest_of(KEY).hex()}",
        "Bearer \ud800",
        "Bearer " + "x" * 10_000,
    ],
)
def test_call_without_a_known_key_is_rejected_and_the_key_not_repeated(
    path: Path, header: str | None
) -> None:
    with pytest.raises(AuthenticationError) as caught:
        Authenticator(path).authenticate(header)
    assert KEY[:-1] not in str(caught.value)


def test_call_for_an_unknown_tenant_is_rejected(path: Path) -> None:
    for name in ("", "bob"):
        with pytest.raises(AuthenticationError):
            Authenticator(path).tenant_named(name)


def test_without_a_file_every_call_is_accepted() -> None:
    authenticator = Authenticator()
    assert authenticator.authenticate(None) is ANONYMOUS
    assert authenticator.authenticate("Bearer whatever") is ANONYMOUS
    assert authenticator.tenant_named("") is ANONYMOUS
    assert not authenticator.requires_keys


def test_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authenticator = Authenticator(path)
    written(path, "[tenants.alice")
    authenticator.reload_if_changed()
    assert authenticator.authenticate(f"Bearer {KEY}").name == "alice"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    path.unlink()
    authenticator.reload_if_changed()
    assert authenticator.authenticate(f"Bearer {KEY}").name == "alice"
    written(path, f"[tenants.bob]\n{line(OTHER_KEY)}")
    authenticator.reload_if_changed()
    assert authenticator.authenticate(f"Bearer {OTHER_KEY}").name == "bob"
    with pytest.raises(AuthenticationError):
        authenticator.authenticate(f"Bearer {KEY}")
    assert not any(key in caplog.text for key in (KEY, OTHER_KEY))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "missing required field `tenants`"),
        ("[tenants.a", "Invalid key file"),
        ("[tenants]", "has no keys"),
        ("[tenants.a]", "has no keys"),
        (f"[tenants.a]\nkeys = ['{KEY}']", "key 1 of tenant a must be sha256:"),
        (f"[tenants.'a b']\n{line(KEY)}", "the tenant name 'a b' must be"),
        (
            f"[tenants.a]\n{line(KEY)}[tenants.b]\n{line(KEY)}",
            "key 1 of tenant b belongs to another",
        ),
        (f"[tenants.a]\nweight = 0\n{line(KEY)}", "weight of tenant a must be greater than 0"),
        (f"[tenants.a]\nweight = nan\n{line(KEY)}", "weight of tenant a must be greater than 0"),
        (
            f"[tenants.a]\nmax_requests = 0\n{line(KEY)}",
            "max_requests of tenant a must be at least 1",
        ),
        (f"[tenants.a]\nmax_tokens = 1.5\n{line(KEY)}", "Expected `int | null`, got `float`"),
        (f"[tenants.a]\nadmin = true\n{line(KEY)}", "unknown field `admin`"),
        ("#" * (2**20 + 1), "is larger than 1048576 bytes"),
        ("\0", "Invalid key file"),
    ],
)
def test_broken_file_is_reported_in_one_line(tmp_path: Path, text: str, part: str) -> None:
    path = written(tmp_path / "keys.toml", text)
    with pytest.raises(StartupError) as caught:
        KeyFile.from_file(path)
    message = str(caught.value)
    assert str(path) in message
    assert part in message
    assert "\n" not in message
    assert KEY not in message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"Cannot read key file .*: No such file"):
        Authenticator(tmp_path / "nothing")


def test_world_readable_file_logs_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        KeyFile.from_file(path)
        assert not caplog.records
        path.chmod(0o644)
        KeyFile.from_file(path)
    assert "is readable by all users" in caplog.text
