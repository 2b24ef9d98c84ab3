"""Files of a store: regular ones are read; links, pipes, sockets and devices are refused without blocking."""

import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest

from cope_sweep.store.files import check_checkpoint, is_disk_full, overwriting, read_bytes, read_tail
from tests.helpers.errors import raises


def test_a_regular_file_is_read_whole_in_part_and_from_its_end(tmp_path):
    path = tmp_path / "file"
    content = os.urandom(300_000)
    path.write_bytes(content)
    assert read_bytes(path) == content
    assert read_bytes(path, 0) == b""
    assert read_bytes(path, 200_001) == content[:200_001]
    assert read_tail(path, 200_001) == (content[-200_001:], True)
    assert read_tail(path, 300_000) == (content, False)
    assert read_tail(path, 400_000) == (content, False)
    assert read_bytes(tmp_path / "none") is None
    assert read_tail(tmp_path / "none", 5) is None


def link(path):
    other = path.with_name("secret")
    other.write_text("secret")
    path.symlink_to(other)


def listening_socket(path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.close()


OTHERS = {
    "link": link,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": listening_socket,
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("read", [read_bytes, lambda path: read_tail(path, 10)], ids=["whole", "tail"])
def test_anything_else_is_refused_at_once(tmp_path, make, read):
    make(tmp_path / "f")
    with raises("not_a_file", file=str(tmp_path / "f")):
        read(tmp_path / "f")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_checkpoint_of_other_files_is_refused(tmp_path, name, kind):
    folder = tmp_path / "run" / "checkpoint"
    folder.mkdir(parents=True)
    check_checkpoint(folder)
    OTHERS[kind](folder / name)
    with raises("not_a_file", file=str(folder / name)):
        check_checkpoint(folder)


@pytest.mark.parametrize(("reason", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_a_disk_is_full_where_a_file_cannot_grow(reason, is_full, tmp_path, monkeypatch):
    assert not is_disk_full(tmp_path)

    def refuse(*args, **options):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert is_disk_full(tmp_path) == is_full


# -- files of users


def overwrite(path, content=b"new"):
    with overwriting(path) as file:
        file.write(content)


def test_a_new_file_has_the_permissions_that_the_umask_allows(tmp_path):
    overwrite(tmp_path / "table.csv")
    (tmp_path / "other").touch()
    assert (tmp_path / "table.csv").read_bytes() == b"new"
    assert (tmp_path / "table.csv").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_links_are_followed_and_permissions_stay(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file, link = tmp_path / "elsewhere" / "table.csv", tmp_path / "table.csv"
    file.write_bytes(b"older and longer")
    file.chmod(0o600)
    link.symlink_to(file)
    overwrite(link)
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o600)
    assert list(file.parent.iterdir()) == [file]


def test_a_link_to_a_file_that_is_not_there_makes_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "made")
    overwrite(tmp_path / "link")
    assert (tmp_path / "made").read_bytes() == b"new"


def test_all_names_of_a_file_have_the_new_content(tmp_path):
    (tmp_path / "a").write_bytes(b"older and longer")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    overwrite(tmp_path / "a")
    assert (tmp_path / "b").read_bytes() == b"new"
    assert (tmp_path / "a").samefile(tmp_path / "b")


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EXDEV])
def test_a_mounted_file_is_written_in_place(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    (tmp_path / "a").write_bytes(b"older and longer")
    monkeypatch.setattr(Path, "replace", refuse)
    overwrite(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), overwriting(tmp_path / "a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_pipe_gets_the_content(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    overwrite(tmp_path / "pipe")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
