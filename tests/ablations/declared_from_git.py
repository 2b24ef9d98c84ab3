"""Writes into the committed results when their claims were declared, as far as Git's history says.

    python -m tests.ablations.declared_from_git

Reports that are written from a store take this from the records of its sweeps (`read.tables.declared`). These results are
older than that. A claim is declared by the first commit whose ablation file contains it. If that commit is younger than
all runs of the report, nothing is written: the claim came later in any case. What is known already stays.
"""

import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pandas as pd
from pandas.testing import assert_frame_equal

from cope_sweep.config import SpecError
from cope_sweep.config.loading import with_inherited
from cope_sweep.config.source import read_source
from cope_sweep.read.reports.runs import result_files, write_files
from cope_sweep.read.tables.declared import declared_in
from cope_sweep.store.results_file import DECLARED, Declaration, file_name
from tests.ablations.update_readme import RESULTS, ROOT, our_reports


def git(*arguments):
    """What a command of Git prints; empty if it fails, as for a file that a commit does not have."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def data_at(commit, name):
    """The content of an ablation file at a commit, with what it inherits; empty if it is not valid today."""
    with tempfile.TemporaryDirectory() as folder:
        chain = [name]
        while (text := git("show", f"{commit}:ablations/{chain[-1]}.yaml")) and len(chain) < 10:
            Path(folder, f"{chain[-1]}.yaml").write_text(text, encoding="utf-8")
            parents = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("inherit:")]
            if not parents:
                break
            chain.append(parents[0])
        with suppress(SpecError):
            path = Path(folder, f"{name}.yaml")
            return with_inherited(read_source(path), path.parent).data if path.exists() else {}
    return {}


def declarations(report, commits):
    """Identity of each claim of a report → its first commit, if that is no younger than all of its runs."""
    content, scale = report.plan.ablation.content, report.plan.ablation.scale
    wanted = {claim.identity(content.primary_metric.name) for claim in content.claims}
    wanted |= {figure.claim_identity for figure in content.figures if figure.has_claim}
    starts_ms = [record.created_ms for record in report.records.values() if record.created_ms is not None]
    found = {}
    for commit, time_s in commits:
        if not starts_ms or int(time_s) * 1000 > max(starts_ms) or wanted <= found.keys():
            break
        for identity in declared_in(data_at(commit, report.plan.name), scale) & (wanted - found.keys()):
            found[identity] = Declaration(int(time_s) * 1000, commit)
    return found


def write_declarations(report):
    """Write the attribute of a report's file of runs; all else stays."""
    path = RESULTS / file_name(report.plan)
    names = [report.plan.name, *(parent.stem for parent in report.plan.ablation.source.parents)]
    log = git("log", "--reverse", "--format=%H %ct", "--", *(f"ablations/{name}.yaml" for name in names))
    found = declarations(report, [line.split() for line in log.splitlines()])
    for identity, known in (report.store.kept(report.plan).declared or {}).items():
        found[identity] = min(known, found.get(identity, known))
    frame = pd.read_parquet(path)
    frame.attrs[DECLARED] = {identity: list(found[identity]) for identity in sorted(found)}
    nothing = pd.DataFrame()
    write_files(RESULTS, result_files(report.plan, frame, nothing, nothing))
    assert_frame_equal(pd.read_parquet(path), frame)


if __name__ == "__main__":
    for each in our_reports():
        if each.plan.ablation.content.has_claims:
            write_declarations(each)
