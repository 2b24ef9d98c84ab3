"""Files of a store: regular ones are read; links, pipes, sockets and devices are refused without blocking."""

import errno
import os
import socket
import tempfile

import pytest

from cope_sweep.store.files import check_checkpoint, is_disk_full, read_bytes, read_tail
from tests.errors import raises


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
