"""A Slurm cluster on this machine: its nodes are namespaces, which end with the process that made them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from tests.helpers.processes import until

NODES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
CORES = 1
"""Of each node, whatever this machine has."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
SLURM_CONF = f"""\
ClusterName=test
SlurmctldHost=n1({NODES["n1"]})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=FOLDER/controller
SlurmdSpoolDir=FOLDER/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=FOLDER/slurmctld.log
SlurmdLogFile=FOLDER/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
MailProg=/bin/true
NodeName=n1 NodeAddr={NODES["n1"]} CPUs={CORES} State=UNKNOWN
NodeName=n2 NodeAddr={NODES["n2"]} CPUs={CORES} State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=shared Nodes=n1,n2 MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Slurm:
    """A cluster of two nodes, each in namespaces of this machine; they share its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen] = {}
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parent),  # of the ablations' plugin
            "TMPDIR": "/run/tmp",  # each node has its own
            "HOME": str(folder / "home"),
            "RAY_worker_niceness": "0",  # else a busy machine gives the workers no time
        }
        for name in list(self.environment):
            if name.startswith(("COPE_SWEEP_", "MLFLOW_", "RAY_ADDRESS", "RAY_AUTH", "RAY_TMPDIR", "SLURM_")):
                del self.environment[name]

    def start(self) -> None:
        for name in ("home", "etc", "controller"):
            (self.folder / name).mkdir()
        (self.folder / "etc" / "slurm.conf").write_text(SLURM_CONF.replace("FOLDER", str(self.folder)))
        hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in NODES.items())]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        for name, address in NODES.items():
            with (self.folder / f"{name}.log").open("w") as log:
                self.nodes[name] = subprocess.Popen(
                    # Whatever becomes of this process: with it end unshare, the first process of its namespaces, and
                    # with that one all others and the network.
                    ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork",
                     "--kill-child", "--mount-proc", "bash", Path(__file__).parent / "slurm_node.sh", self.folder, name,
                     address],
                    env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
        first, second = (str(self._first_process(name)) for name in NODES)
        subprocess.run(
            ["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second],
            check=True,
        )
        until(lambda: self.idle_nodes() == len(NODES), timeout_s=60)

    def _first_process(self, node: str) -> int:
        """The id of the first process in a node's namespaces."""
        process = psutil.Process(self.nodes[node].pid)
        until(lambda: [child for child in process.children() if child.name() == "bash"], timeout_s=30)
        return process.children()[0].pid

    def execute(self, *words: str | Path, node: str = "n1", cwd: Path | None = None) -> subprocess.CompletedProcess:
        """Execute a command on a node."""
        enter = ["nsenter", "--target", str(self._first_process(node)), "--net", "--pid", "--mount", "--uts", "--ipc"]
        folder = f"--wd={cwd or self.folder}"
        return subprocess.run(
            [*enter, folder, *words], env=self.environment, capture_output=True, text=True, timeout=120
        )

    def idle_nodes(self) -> int:
        """The number of nodes that have no job."""
        return (
            self.execute("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t")
            .stdout.split()
            .count("idle")
        )

    def submit(self, *words: str | Path, cwd: Path) -> str:
        """`sbatch WORDS`; the job's number."""
        done = self.execute("sbatch", "--parsable", *words, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """COMPLETED, FAILED, RUNNING, …"""
        return re.search(r"JobState=(\w+)", self.execute("scontrol", "show", "job", job).stdout)[1]

    def wait(self, job: str, timeout_s: float = 240) -> str:
        """The state in which a job ends."""
        until(lambda: self.state(job) in ENDED, timeout_s)
        return self.state(job)

    def end(self) -> None:
        for process in self.nodes.values():
            process.kill()
            process.wait()
