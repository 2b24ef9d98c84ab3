"""Benchmark of the sweep: many trivial runs, the time between two runs, other ways to use Ray, memory, faults, the broker.

Real commands are measured, each in processes of its own, from the stores that they write.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cope_benchmarks.sweep_commands import Measured, execute, output_of
from cope_benchmarks.sweep_memory import difference, footprint
from cope_benchmarks.sweep_peers import CPUS
from cope_benchmarks.sweep_processes import BROKER
from cope_sweep.cli.output import grid
from cope_sweep.store.provenance import versions

if TYPE_CHECKING:
    from rich.table import Table

ABLATION = """\
title: Many short runs
base:
  task: {kind: selective_copy, tokens: 4, blanks: 12, dense_blanks: 6, sparse_blanks: 24}
  model: {layers: 1, dim: 32, heads: 2, position: [cope]}
  train: {steps: STEPS, batch: 16, lr: 1e-3}
  evaluate: {every: STEPS, sequences: 32, final_sequences: 32}
seeds: SEEDS
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%"}
resources: {groups: GROUPS, device: cpu}
"""
RUNS, SHORT_RUNS, PEER_RUNS = 1_000, 20, 4
SHORT_STEPS = 50
LONG_RUNS, LONG_STEPS = 6, 600
"""Runs of a few seconds, one after another on one worker."""
ENDLESS_STEPS = 10_000_000
LONG_RUN_S = 30.0
FOOTPRINT_GROUPS = (2, 4, 8, 16)
BROKER_GROUPS, BROKER_RUNS = 1_000, 100_000
SQLITE_SHARE = 10
"""With an SQLite index the broker gets a tenth of the runs, because each takes milliseconds."""
GOALS = {
    "runs_per_s": 20.0, "bytes_per_run": 50e3, "share_of_30_s": 0.01, "of_trainer": 20.0, "of_task": 3.0,
    "beside_a_worker_bytes": 300e6, "first_step_s": 10.0,
}  # fmt: skip

RUN = [sys.executable, "-m", "cope_sweep.cli", "run"]
PEERS = [sys.executable, "-m", "cope_benchmarks.sweep_peers"]


PARTS = ("trivial_runs", "gap", "ways", "footprint", "recovery", "broker")
WAYS = ("engine", "loop", "task, new process", "task, process reused", "trainer")
"""The ways to train the same short runs, which are compared."""


def measure(
    runs: int = RUNS,
    short_runs: int = SHORT_RUNS,
    peer_runs: int = PEER_RUNS,
    *,
    long_steps: int = LONG_STEPS,
    footprint_groups: tuple[int, ...] = FOOTPRINT_GROUPS,
    broker_groups: int = BROKER_GROUPS,
    broker_runs: int = BROKER_RUNS,
    ways: Collection[str] = WAYS,
    parts: Collection[str] = PARTS,
) -> dict[str, Any]:
    """Measure the sweep on this machine.

    Args:
        runs: Runs of one step that the whole engine trains.
        short_runs: Runs of 50 steps that are trained by the engine, in a plain loop, and by one Ray task each.
        peer_runs: How many of them are trained by one TorchTrainer each, which takes 10 to 30 s a run.
        long_steps: Steps of the runs between which the gap is measured.
        footprint_groups: Numbers of worker groups whose memory is measured.
        broker_groups: Groups of the simulated broker.
        broker_runs: Its runs, with leases in memory; with leases in an SQLite index, a tenth of them.
        ways: The ways to train the same runs.
        parts: What to measure.

    Raises:
        subprocess.CalledProcessError: A command failed. It holds the command's output.
    """
    load = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        folder = Path(name)
        measures: dict[str, Callable[[], Any]] = {
            "trivial_runs": lambda: _trivial(folder, runs),
            "gap": lambda: _gap(folder, long_steps),
            "ways": lambda: _ways(folder, short_runs, peer_runs, ways),
            "footprint": lambda: [_footprint(folder, groups) for groups in footprint_groups],
            "recovery": lambda: _recovery(folder),
            "broker": lambda: [
                output_of(_broker(folder, leases, broker_groups, number))
                for leases, number in (("memory", broker_runs), ("sqlite", max(1, broker_runs // SQLITE_SHARE)))
            ],
        }
        measured = {part: measures[part]() for part in PARTS if part in parts}
    if "footprint" in measured:
        measured["beside_a_worker"] = difference(measured["footprint"])
    return measured | {
        "goals": GOALS,
        "machine": {
            "host": platform.node(),
            "cpus": len(os.sched_getaffinity(0)),
            "load": [round(load, 2), round(psutil.getloadavg()[0], 2)],
        },
        "versions": versions(),
    }


def _trivial(folder: Path, runs: int) -> dict[str, Any]:
    """Runs of one step through the whole command: throughput after start-up, and growth of driver and broker."""
    ablation = _ablation(folder / "trivial.yaml", runs, 1)
    done = execute([*RUN, str(ablation), "--no-mlflow"], folder / "trivial", samples_usage=True)
    return {
        "runs": runs,
        "first_run_ended_s": round(done.spans_s[0][1] - done.start_s, 2),
        "runs_per_s": round((runs - 1) / (done.ends_s[-1] - done.ends_s[0]), 2),
        "whole_command_s": round(done.whole_s, 2),
        "bytes_per_run": {kind: round(done.growth("rss").get(kind, 0)) for kind in ("driver", BROKER)},
        "cpu_ms_per_run": {kind: round(1000 * cpu_s, 1) for kind, cpu_s in done.growth("cpu_s").items()},
        "load": round(psutil.getloadavg()[0], 2),
    }


def _gap(folder: Path, steps: int) -> dict[str, Any]:
    """Runs of some seconds on one worker: the time from the result of a run to the begin of the next."""
    ablation = _ablation(folder / "long.yaml", LONG_RUNS, steps, groups=1)
    done = execute([*RUN, str(ablation), "--no-mlflow"], folder / "long")
    gaps_s = done.gaps_s()
    lengths_s = [end - start for start, end in done.spans_s]
    return {
        "runs": LONG_RUNS,
        "steps": steps,
        "run_s": round(statistics.median(lengths_s), 2),
        "median_ms": round(1000 * statistics.median(gaps_s), 1),
        "most_ms": round(1000 * max(gaps_s), 1),
        "share": round(sum(gaps_s) / (sum(gaps_s) + sum(lengths_s[1:])), 5),
        "share_of_30_s": round(statistics.mean(gaps_s) / LONG_RUN_S, 5),
    }


def _ways(folder: Path, runs: int, trainer_runs: int, wanted: Collection[str]) -> dict[str, Any]:
    """The same short runs by the engine, in a plain loop, and by other ways to use Ray."""
    short = _ablation(folder / "short.yaml", runs, SHORT_STEPS)
    few = _ablation(folder / "few.yaml", trainer_runs, SHORT_STEPS)
    commands = {
        "engine": [*RUN, str(short), "--no-mlflow"],
        "loop": [*PEERS, "loop", str(short)],
        "task, new process": [*PEERS, "task", str(short)],
        "task, process reused": [*PEERS, "reused_task", str(short)],
        "trainer": [*PEERS, "trainer", str(few)],
    }
    found = {
        name: _throughput(execute(command, folder / f"way-{name}"), runs)
        for name, command in commands.items()
        if name in wanted
    }
    own = found["engine"]["runs_per_s"]
    for way in found.values():
        way["engine_is_faster_by"] = round(own / way["runs_per_s"], 2)
    return {"steps": SHORT_STEPS, "ways": found}


def _throughput(done: Measured, wanted: int) -> dict[str, Any]:
    """Runs per second from the begin of the first run to the end of the last, and what comes before.

    Where fewer than `wanted` runs were trained, the time of the others is added: each takes as long as those after the
    first on each CPU, so that the start of the processes of every run counts.
    """
    number, first_s, ends_s = len(done.spans_s), done.spans_s[0][0], done.ends_s
    total_s = ends_s[-1] - first_s
    parallel = min(CPUS, number - 1)
    each_s = (ends_s[-1] - ends_s[parallel - 1]) / (number - parallel) if parallel else total_s
    return {
        "runs": number,
        "first_run_began_s": round(first_s - done.start_s, 2),
        "runs_per_s": round(wanted / (total_s + (wanted - number) * each_s), 4),
        "whole_command_s": round(done.whole_s, 2),
    }


def _footprint(folder: Path, groups: int) -> dict[str, Any]:
    """The memory of the processes of a sweep while all its groups train."""
    ablation = _ablation(folder / f"groups-{groups}.yaml", groups + 1, ENDLESS_STEPS, groups=groups)
    command = [sys.executable, "-m", "cope_benchmarks.sweep_memory", str(ablation), str(groups)]
    return footprint(command, folder / f"groups-{groups}", groups)


def _recovery(folder: Path) -> dict[str, Any]:
    """How long training takes to go on after a worker was killed, and after a node was added."""
    ablation = _ablation(folder / "recovery.yaml", 3, ENDLESS_STEPS)
    command = [sys.executable, "-m", "cope_benchmarks.sweep_recovery", str(ablation)]
    return output_of([*command, "--store", str(folder / "recovery")])


def _broker(folder: Path, leases: str, groups: int, runs: int) -> list[str]:
    arguments = (leases, groups, runs, "--store", folder / f"broker-{leases}")
    return [sys.executable, "-m", "cope_benchmarks.sweep_broker", *map(str, arguments)]


def _ablation(path: Path, runs: int, steps: int, groups: int | str = "auto") -> Path:
    values = {"SEEDS": list(range(runs)), "STEPS": steps, "GROUPS": groups}
    text = ABLATION
    for name, value in values.items():
        text = text.replace(name, str(value))
    path.write_text(text)
    return path


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table, with the goals. It has the parts that were measured."""
    shown = grid("", "measured", "goal")
    add = partial(_add, shown)
    rows = {
        "trivial_runs": _trivial_rows, "gap": _gap_rows, "ways": _way_rows, "footprint": _footprint_rows,
        "recovery": _recovery_rows, "broker": _broker_rows,
    }  # fmt: skip
    for part in PARTS:
        if part in measured:
            rows[part](add, measured)
    return shown


def _trivial_rows(add: Callable[..., None], measured: dict[str, Any]) -> None:
    trivial, goals = measured["trivial_runs"], measured["goals"]
    add(f"{trivial['runs']:,} runs of 1 step", f"{trivial['runs_per_s']:.1f} runs/s", f"≥ {goals['runs_per_s']:g}")
    for kind, growth in trivial["bytes_per_run"].items():
        add(f"– growth of the {kind}", f"{growth / 1e3:.1f} KB/run", f"≤ {goals['bytes_per_run'] / 1e3:g}")
    parts = ", ".join(f"{kind} {cpu_ms:.0f}" for kind, cpu_ms in trivial["cpu_ms_per_run"].items() if cpu_ms >= 1)
    add("– CPU time of a run, ms", parts)
    add("from the command to the end of the first run", f"{trivial['first_run_ended_s']:.1f} s")


def _gap_rows(add: Callable[..., None], measured: dict[str, Any]) -> None:
    gap, goals = measured["gap"], measured["goals"]
    add(f"between two runs of {gap['run_s']:.1f} s, median (most)", f"{gap['median_ms']:.0f} ms ({gap['most_ms']:.0f})")
    add(f"– of the time, runs of {gap['run_s']:.1f} s", f"{gap['share']:.2%}")
    add("– of the time, runs of 30 s", f"{gap['share_of_30_s']:.2%}", f"≤ {goals['share_of_30_s']:.0%}")


def _way_rows(add: Callable[..., None], measured: dict[str, Any]) -> None:
    goals = measured["goals"]
    wanted = {"trainer": f"≥ {goals['of_trainer']:g} ×", "task, new process": f"≥ {goals['of_task']:g} ×"}
    for name, way in measured["ways"]["ways"].items():
        text = f"{way['runs_per_s']:.3g} runs/s, {way['whole_command_s']:.0f} s in all"
        ratio = "" if name == "engine" else f"; the engine: {way['engine_is_faster_by']:.3g} ×"
        add(f"{way['runs']} runs of {measured['ways']['steps']} steps: {name}", text + ratio, wanted.get(name, ""))


def _footprint_rows(add: Callable[..., None], measured: dict[str, Any]) -> None:
    for each in measured["footprint"]:
        parts = ", ".join(
            f"{kind} {part['rss'] / 1e6:.0f} ({part['pss'] / 1e6:.0f})" for kind, part in each["of_one_process"].items()
        )
        add(f"{each['groups']} nodes with a worker: RSS (PSS) of one process, MB", parts)
    beside = measured["beside_a_worker"]
    text = f"{beside['rss'] / 1e6:.0f} MB RSS, {beside['pss'] / 1e6:.0f} MB PSS"
    goal = f"≤ {measured['goals']['beside_a_worker_bytes'] / 1e6:g}"
    add("each further worker needs, besides itself", text, goal)


def _recovery_rows(add: Callable[..., None], measured: dict[str, Any]) -> None:
    goal = f"≤ {measured['goals']['first_step_s']:g} s"
    titles = {"worker_killed": "a worker is killed", "node_added": "a node has registered"}
    for name, title in titles.items():
        times = measured["recovery"][name]
        text = f"{times['first_step_s']:.1f} s, of them {times['process_started_s']:.1f} s until its process starts, which "
        text += f"then uses {times['process_cpu_s']:.1f} s of CPU time; load {times['load']:g}"
        add(f"{title}: until the first step", text, goal)


def _broker_rows(add: Callable[..., None], measured: dict[str, Any]) -> None:
    for each in measured["broker"]:
        text = f"{each['runs_per_s']:,.0f} runs/s, {each['cpu_ms_per_operation']:.3f} ms CPU an operation"
        add(
            f"the broker alone, {each['groups']:,} groups, {each['runs']:,} runs, leases: {each['leases']}",
            f"{text}, {each['peak_rss_bytes'] / 1e6:.0f} MB",
        )


def _add(shown: Table, name: str, value: str, goal: str = "") -> None:
    shown.add_row(name, value, goal)
