"""Ways in which a file of a store is damaged."""

import shutil


def empty(path):
    path.write_bytes(b"")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def wrong_type(path):
    path.write_text('["a", {"metrics": null}]\n')


def other_keys(path):
    path.write_text('{"status": 3, "attempt": "x", "spec": [], "metrics": {"a": "b"}}')


def missing(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = (empty, cut, garble, wrong_type, other_keys, missing, folder)
