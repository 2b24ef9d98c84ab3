"""API keys: made, stored as digests, revoked, and read again when the file changes."""

from __future__ import annotations

import json
import os
import stat
import threading
from hashlib import sha256
from pathlib import Path

import pytest
from cope_services.http import keys
from cope_services.http.keys import KeysError, KeysFile

from tests.cli.conftest import Shell


@pytest.fixture
def file(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "keys.json")


def test_a_key_is_found_by_its_text_only(file: KeysFile) -> None:
    assert not file.protects
    lab, ci = file.create("lab", ["read", "infer"]), file.create("ci", ["submit"])
    assert file.protects
    assert file.find(lab).name == "lab"
    assert file.find(ci).scopes == ("submit",)
    for wrong in ("", lab[:-1], lab + "x", lab.upper(), "\udc80", "x" * 10_000, file.all()[0].sha256):
        assert file.find(wrong) is None


def test_the_file_has_digests_and_only_its_owner_reads_it(file: KeysFile) -> None:
    secret = file.create("lab", ["read"])
    assert len(secret) == len("cope_") + 43  # 256 bits in base64
    assert secret not in file.path.read_text()
    (stored,) = json.loads(file.path.read_text())["keys"]
    assert stored["sha256"] == sha256(secret.encode()).hexdigest()
    assert set(stored) == {"name", "scopes", "sha256", "created"}
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [path.name for path in file.path.parent.iterdir()] == ["keys.json"]


def test_two_keys_differ(file: KeysFile) -> None:
    assert len({file.create(f"key-{n}", ["read"]) for n in range(20)}) == 20


def test_a_change_of_another_process_is_seen(file: KeysFile) -> None:
    server = KeysFile(file.path)
    secret = file.create("lab", ["read"])
    assert server.find(secret) is not None
    file.revoke("lab")
    assert server.find(secret) is None
    assert server.protects  # without keys, a server that had some stays closed
    assert not KeysFile(file.path).protects
    secret = file.create("lab", ["read"])
    assert server.find(secret) is not None
    file.path.unlink()
    assert server.find(secret) is None
    assert server.protects


def test_wrong_names(file: KeysFile) -> None:
    file.create("lab", ["read"])
    with pytest.raises(KeysError, match="there is a key 'lab'"):
        file.create("lab", ["read"])
    with pytest.raises(KeysError, match="there is no key 'ci' in .*; its keys: lab"):
        file.revoke("ci")
    for name in ("", "a b", "../x", "-x", "x" * 65, "ü"):
        with pytest.raises(KeysError, match="cannot be the name"):
            file.create(name, ["read"])
    assert [key.name for key in file.all()] == ["lab"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged: the file: Invalid JSON"),
        ("[]", "damaged: the file"),
        ('{"keys": [{"name": "a"}]}', "damaged: keys.0.scopes"),
        ('{"version": 2, "keys": []}', "damaged: version"),
        ('{"keys": [{"name": "a", "scopes": ["all"], "sha256": "0", "created": ""}]}', "damaged: keys.0.scopes.0"),
    ],
)
def test_a_damaged_file_is_an_error(file: KeysFile, content: str, message: str) -> None:
    file.path.write_text(content)
    file.path.chmod(0o600)
    for ask in (lambda: file.protects, lambda: file.find("x"), lambda: file.create("lab", ["read"])):
        with pytest.raises(KeysError, match=message):
            ask()
    assert file.path.read_text() == content


def test_a_file_that_others_may_write_to_is_refused(file: KeysFile) -> None:
    file.create("lab", ["read"])
    file.path.chmod(0o620)
    with pytest.raises(KeysError, match=r"other users may write to .* run `chmod 600"):
        _ = KeysFile(file.path).protects


def test_a_folder_is_no_keys_file(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="is not a regular file"):
        _ = KeysFile(tmp_path).protects
    with pytest.raises(KeysError, match="cannot be written"):
        KeysFile(tmp_path / "none" / "keys.json").create("lab", ["read"])


def test_commands_at_the_same_time_lose_nothing(file: KeysFile) -> None:
    makers = [threading.Thread(target=KeysFile(file.path).create, args=(f"key-{n}", ["read"])) for n in range(8)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert {key.name for key in file.all()} == {f"key-{n}" for n in range(8)}


def test_a_change_that_was_interrupted_is_reported(file: KeysFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "WAIT_S", 0.05)
    left = file.path.with_name("keys.json.new")
    left.touch()
    with pytest.raises(KeysError, match="if none is, delete .*keys.json.new"):
        file.create("lab", ["read"])
    left.unlink()
    file.create("lab", ["read"])


def test_the_digests_are_compared_in_constant_time(file: KeysFile, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [file.create(name, ["read"]) for name in ("a", "b", "c")]
    compared: list[tuple[str, str]] = []

    def compare(left: str, right: str) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    assert file.find(secrets[0]).name == "a"
    assert len(compared) == 3  # the first match does not end the search
    assert {right for _, right in compared} == {sha256(secrets[0].encode()).hexdigest()}


def test_the_commands(tmp_path: Path) -> None:
    serve, path = Shell(tmp_path), tmp_path / "keys.json"
    out, err = serve("serve", "--keys")
    assert out == ""
    assert "there are no keys" in err
    out, err = serve("serve", "--new-key", "lab", "--scope", "infer", "--scope", "read", "--scope", "read")
    found = KeysFile(path).find(out.strip())
    assert (found.name, found.scopes) == ("lab", ("infer", "read"))
    assert "the only time" in err
    assert out.strip() not in err
    assert KeysFile(path).find(serve("serve", "--new-key", "page")[0].strip()).scopes == ("read",)
    out, _ = serve("serve", "--keys")
    assert [line.split("  ")[:2] for line in out.splitlines()] == [["lab", "infer, read"], ["page", "read"]]
    assert serve("serve", "--revoke", "lab")[0] == "revoked lab; keys.json has 1 key\n"
    assert [key.name for key in KeysFile(path).all()] == ["page"]
    for arguments, message in [
        (["--revoke", "lab"], "there is no key 'lab'"),
        (["--new-key", "x", "--scope", "all"], "there is no scope 'all'; the scopes are read, infer, submit"),
        (["--scope", "read"], "give its name, too: --new-key NAME"),
        (["--new-key", "x", "--revoke", "y"], "give one of them"),
        (["--host", "0.0.0.0", "--keys-file", "none.json"], "cope-sweep serve --new-key NAME"),
    ]:
        out, err = serve("serve", *arguments, code=2)
        assert out == ""
        assert message in err
    assert sorted(os.listdir(tmp_path)) == ["ablations", "keys.json"]
