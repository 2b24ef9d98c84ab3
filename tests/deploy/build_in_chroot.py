"""Executes deploy/Dockerfile where no container daemon runs: each stage in a chroot of its own, made by debootstrap.

    python -m tests.deploy.build_in_chroot FOLDER --arg VARIANT=cuda

Needs root and debootstrap. RUN is executed in the chroot, as USER, with a mount namespace of its own; COPY respects
.dockerignore; ARG, ENV, SHELL, WORKDIR and USER are those of the file. Host settings that a build daemon would provide,
name resolution and certificates, are copied in; `--cache` mounts a folder as uv's cache. Where PyTorch's index of CPU
wheels cannot be reached, `--any-torch` takes torch with its CUDA libraries also for VARIANT=cpu: all other steps are
those of that variant, and the size is not. At the end the service of the
image is started by its CMD, and asked by its HEALTHCHECK.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.deploy.dockerfile import Instruction, Stage, ignore_lines, in_context, parse

ROOT = Path(__file__).parents[2]
CODENAMES = {"12": "bookworm", "13": "trixie"}
CPU_WHEELS = "export UV_TORCH_BACKEND=cpu"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass
class Chroot:
    """A stage while it is built, or the finished image."""

    root: Path
    cache: Path | None
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": SYSTEM_PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    user: str = "0:0"

    def path(self, inside: str) -> Path:
        return self.root / os.path.join(self.folder, inside).lstrip("/")

    def command(self, words: list[str]) -> list[str]:
        """The command that runs `words` inside, with mounts that end with it."""
        root = shlex.quote(str(self.root))
        mounts = f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev; mount -t tmpfs tmpfs {root}/dev/shm"
        environment = self.arguments | self.environment
        if self.cache is not None:
            mounts += f"; mkdir -p {root}/var/cache/uv; mount --bind {shlex.quote(str(self.cache))} {root}/var/cache/uv"
            environment["UV_CACHE_DIR"] = "/var/cache/uv"
        if self.user != "0:0":
            environment["HOME"] = "/home/cope"
        variables = " ".join(shlex.quote(f"{key}={value}") for key, value in environment.items())
        inside = shlex.join(["sh", "-c", f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"])
        return [
            "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec",
            f"{mounts}; exec chroot --userspec={self.user} {root} env -i {variables} {inside}",
        ]  # fmt: skip


def debootstrap(folder: Path, version: str) -> Path:
    """The chroot of a Debian release, once: only its smallest set of packages, as in its slim image."""
    base = folder / f"debian-{version}"
    if not base.exists():
        subprocess.run(["debootstrap", "--variant=minbase", CODENAMES[version], str(base)], check=True)
    shutil.copy("/etc/resolv.conf", base / "etc/resolv.conf")
    return base


def build(folder: Path, overrides: dict[str, str], cache: Path | None, *, any_torch: bool = False) -> Chroot:
    """Execute all stages and return the last one."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    if any_torch:
        if CPU_WHEELS not in text:
            raise SystemExit(f"deploy/Dockerfile has no {CPU_WHEELS!r}")
        text = text.replace(CPU_WHEELS, ":")
    defaults, stages = parse(text)
    given = defaults | overrides
    done: dict[str, Chroot] = {}
    for number, stage in enumerate(stages):
        version = re.sub(r"\$\{(\w+)\}", lambda each: given[each[1]], stage.base).removeprefix("debian:").split(".")[0]
        target = folder / f"stage-{number}"
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", str(debootstrap(folder, version)), str(target)], check=True)
        chroot = Chroot(target, cache)
        _trust_host_certificates(chroot, stage)
        for instruction in stage.instructions:
            say(f"[{stage.name or number}] {instruction.name} {instruction.text[:150]}")
            execute(chroot, instruction, overrides, done)
        done[stage.name or str(number)] = chroot
    return done[stages[-1].name or str(len(stages) - 1)]


def _trust_host_certificates(chroot: Chroot, stage: Stage) -> None:
    """A network that inspects TLS has a certificate of its own; uv and pip would not know it."""
    host = Path("/etc/ssl/certs/ca-certificates.crt")
    if host.exists() and any(each.name == "RUN" for each in stage.instructions):
        shutil.copy(host, chroot.root / "host-certificates.crt")
        chroot.arguments |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/host-certificates.crt")


def execute(chroot: Chroot, instruction: Instruction, overrides: dict[str, str], done: dict[str, Chroot]) -> None:
    if instruction.name == "ARG":
        key, _, value = instruction.text.partition("=")
        chroot.arguments[key] = overrides.get(key, value)
    elif instruction.name == "ENV":
        for word in shlex.split(instruction.text):
            key, _, value = word.partition("=")
            chroot.environment[key] = value.replace("$PATH", chroot.environment["PATH"])
    elif instruction.name == "SHELL":
        chroot.shell = instruction.words()[1]
    elif instruction.name == "USER":
        chroot.user = instruction.text
    elif instruction.name == "WORKDIR":
        chroot.folder = instruction.text
        chroot.path(".").mkdir(parents=True, exist_ok=True)
    elif instruction.name == "RUN":
        started = time.monotonic()
        subprocess.run(chroot.command([*chroot.shell, instruction.text]), check=True)
        say(f"    {time.monotonic() - started:.0f} s")
    elif instruction.name == "COPY":
        _copy(chroot, instruction, done)
    elif instruction.name not in ("EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"):
        raise SystemExit(f"{instruction.name} is not implemented")


def _copy(chroot: Chroot, instruction: Instruction, done: dict[str, Chroot]) -> None:
    options, (*sources, target) = instruction.words()
    destination = chroot.path(target)
    if "from" in options:
        (source,) = sources
        whole = done[options["from"]].root / source.lstrip("/")
        destination.mkdir(parents=True, exist_ok=True)
        # Hard links: the folder of dependencies has gigabytes. A copy where the owner changes.
        kind = "-a" if "chown" in options else "-al"
        subprocess.run(["cp", kind, f"{whole}/.", str(destination)], check=True)
        if "chown" in options:
            subprocess.run(["chown", "--recursive", options["chown"], str(destination)], check=True)
        return
    ignore = ignore_lines((ROOT / ".dockerignore").read_text())
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for source in sources:
        matching = [each for each in tracked if each == source or each.startswith(f"{source}/")]
        sent = [each for each in matching if in_context(each, ignore)]
        if not sent:
            raise SystemExit(f"COPY {source}: .dockerignore lets nothing of it through")
        for each in sent:
            inside = Path(each).name if each == source else str(Path(each).relative_to(source))
            path = destination / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / each, path)


def check(image: Chroot) -> None:
    """Run a tiny sweep as the image's user, then its CMD, and its HEALTHCHECK until that succeeds."""
    _, stages = parse((ROOT / "deploy" / "Dockerfile").read_text())
    last = {each.name: each for each in stages[-1].instructions}
    tiny = ["--set", "train.steps=4", "--set", "train.batch=4", "--set", "evaluate.final_sequences=8"]
    run = ["cope-sweep", "run", "quickstart", "--local", "--store", "/data/store", *tiny]
    for words in (["id"], ["ray", "--version"], ["mlflow", "--version"], run):
        say(f"$ {shlex.join(words)}")
        subprocess.run(image.command(words), check=True)
    libraries = sorted(path.name for path in (image.root / "home/cope/.cache/cope-sweep").glob("*.so"))
    say(f"native kernels: {' '.join(libraries)}")
    assert libraries
    key = ["cope-sweep", "serve", "--new-key", "check", "--keys-file", "/data/keys.json"]
    subprocess.run(image.command(key), check=True, stdout=subprocess.DEVNULL)
    image.environment["COPE_SWEEP_KEYS_FILE"] = "/data/keys.json"
    _, health = Instruction("CMD", re.sub(r"^.*?CMD ", "", last["HEALTHCHECK"].text)).words()
    _, entry = last["ENTRYPOINT"].words()
    # The port of a daemon's container is its own; this one shares the host's.
    words = ["bash", "-c", f"exec {shlex.join([*entry[:1], '-s', *entry[1:]])} {shlex.join(last['CMD'].words()[1])}"]
    image.environment |= {"COPE_SWEEP_PORT": os.environ.get("CHECK_PORT", "18000"), "COPE_SWEEP_STORE": "/data/store"}
    service = subprocess.Popen(image.command(words))
    try:
        until = time.monotonic() + 120
        while subprocess.run(image.command(health), check=False).returncode:
            if service.poll() is not None or time.monotonic() > until:
                raise SystemExit("the service did not become healthy")
            time.sleep(1)
        say("the service is healthy")
    finally:
        # The change of user has undone --kill-child. The first process of the namespace takes the others along.
        for child in psutil.Process(service.pid).children(recursive=True):
            child.kill()
        service.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--any-torch", action="store_true")
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("this needs root: it calls chroot and debootstrap")
    options.folder.mkdir(parents=True, exist_ok=True)
    arguments = dict(each.split("=", 1) for each in options.arg)
    image = build(options.folder.absolute(), arguments, options.cache, any_torch=options.any_torch)
    check(image)
    size = subprocess.run(["du", "-sm", str(image.root)], capture_output=True, text=True, check=True).stdout.split()[0]
    say(f"the image has {size} MB")


if __name__ == "__main__":
    main()
