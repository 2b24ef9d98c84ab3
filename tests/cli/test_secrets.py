"""No secret leaves the process that was given it: neither into a file nor into an answer."""

import contextlib
import json
import time
from pathlib import Path

import pytest
from cope_services.http.settings import Settings

from cope_sweep.store import Store
from tests.helpers.sample_store import API, serving
from tests.helpers.sweeps import sweep_record

SECRET = "correct-h0rse"
pytestmark = pytest.mark.slow

FORMS = {
    "user": lambda url: url.replace("postgres:@", f"postgres:{SECRET}@"),
    "escaped": lambda url: url.replace("postgres:@", f"postgres:%2F{SECRET}%40@"),
    "query": lambda url: url.replace("postgres:@", "") + f"&user=postgres&password={SECRET}",
}


def files_with(folder, text):
    """The files below a folder that have a text, as they lie there."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def settings(shell, **changes):
    folders = {"ablations": shell.folder / "ablations", "store": shell.folder / "store"}
    return Settings.model_validate({**folders, "keys_file": shell.folder / "keys.txt", "device": "cpu"} | changes)


@pytest.mark.parametrize("form", ["escaped", pytest.param("query", marks=pytest.mark.thorough)])
def test_the_password_of_an_index_is_in_no_file_and_no_output(shell, postgres, form):
    index = FORMS[form](postgres.new_database())
    process = shell.start("run", "tiny", "--local", "--max-runs", "1", "--index", index)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert SECRET not in out + err
    assert f"--index {'postgresql://***@/' if form != 'query' else 'postgresql:///'}" in out.replace("'", "")
    assert files_with(shell.folder, "mlflow.source.name")
    assert files_with(shell.folder, SECRET) == []
    (record,) = (shell.folder / "store" / "sweeps").glob("*.json")
    command = json.loads(record.read_text())["command"]
    assert command[:2] == ["__main__.py", "run"]
    log, _ = shell("logs", record.stem, "--index", index)
    assert "starts on" in log
    assert SECRET not in log
    with serving(settings(shell, index=index)) as client:
        shown = client.get(f"{API}/sweeps/{record.stem}")
        assert shown.json()["command"] == command


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the command lines of processes in /proc")
def test_a_password_on_the_command_line_is_not_in_the_list_of_processes(shell, tmp_path):
    """Which every user of the machine can read, and from which Ray takes the name of its job."""
    index = f"postgresql://postgres:{SECRET}@/name?host={tmp_path}"
    process = shell.start("runs", "--index", index)
    seen = set()
    while process.poll() is None:
        with contextlib.suppress(OSError):
            seen.add(Path(f"/proc/{process.pid}/cmdline").read_bytes().decode())
        time.sleep(0.01)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "does not answer" in err
    last = [line for line in seen if "postgresql://***@/name" in line]
    assert last, seen
    assert not any(SECRET in line for line in last)


@pytest.mark.parametrize("form", FORMS)
def test_the_service_does_not_name_its_index(shell, form, tmp_path, caplog):
    index = FORMS[form](f"postgresql://postgres:@/name?host={tmp_path}")
    with serving(settings(shell, index=index)) as client:
        for path in ("/health/ready", f"{API}/runs", f"{API}/sweeps/20261121-101500-3f2a"):
            response = client.get(path)
            assert (response.status_code, response.json()["code"]) == (503, "not_ready")
            assert not any(part in response.text for part in (SECRET, "postgres", str(tmp_path)))
    assert "does not answer" in caplog.text
    assert SECRET not in caplog.text


def test_secrets_that_older_versions_have_recorded_are_not_shown(shell):
    store = Store(shell.folder / "store", create=True)
    url = f"postgresql://u:{SECRET}@h/n"
    record = sweep_record("20261121-101500-3f2a", [], command=["cope-sweep", "run", "tiny", f"--index={url}"])
    document = record.model_dump(mode="json") | {"notes": [f"no answer from {url}"]}
    document["command"] = ["cope-sweep", "run", "tiny", "--index", url, "--store", f"s3://key:{SECRET}@bucket"]
    store.write_sweep(record)
    name = f"sweeps/{record.sweep_id}.json"
    store.write(name, json.dumps(document).encode())
    store.write(f"logs/{record.sweep_id}/driver.log", f"starts: run --index {url}\n".encode())
    with serving(settings(shell)) as client:
        shown = client.get(f"{API}/sweeps/{record.sweep_id}").json()
    assert shown["command"][3:] == ["--index", "postgresql://***@h/n", "--store", "s3://***@bucket"]
    assert SECRET not in json.dumps(shown)
    assert shell("logs", record.sweep_id)[0] == "starts: run --index postgresql://***@h/n\n"
    assert SECRET not in json.dumps(shell.json("logs", record.sweep_id))


@pytest.mark.parametrize(
    "options",
    [
        ["--index", f"postgresql://u:a/{SECRET}[@127.0.0.1:1/n"],
        ["--index", f"postgresql://u:{SECRET}@h:p@rt/n"],
        ["--index", f"u:{SECRET}@h/n"],
        ["--mlflow", f"http://u:{SECRET}[@127.0.0.1:1"],
        ["--mlflow", f"http://{SECRET}@127.0.0.1:1"],
        ["--mlflow", f"postgresql://h/n?password={SECRET}"],
        ["--store", f"s3://key:{SECRET}@bucket/[prefix"],
        ["--store", f"ftp://key:{SECRET}@bucket"],
        ["--address", f"http://u:{SECRET}@h:1"],
    ],
    ids=lambda options: f"{options[0]} {options[1].replace(SECRET, '***')}",
)
def test_errors_of_commands_have_no_secrets(shell, options, monkeypatch):
    # Another test of this process may have left a cluster, which a command would use without looking at the address.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    out, err = shell("run", "tiny", "--json", *options, code=2)
    assert SECRET not in out + err
    assert files_with(shell.folder, SECRET) == []
