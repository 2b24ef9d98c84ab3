"""What must not change unnoticed: plans of the shipped files, and tables of the committed results.

`python -m tests.ablations.pins` writes run_ids.json, set_cases.json and tables.json. Their difference shows which runs,
rows, errors and numbers a change makes invalid.
"""

import hashlib
import json

from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.errors import UserError
from tests.ablations.set_cases import CASES
from tests.ablations.test_ablation_plans import ABLATIONS, FOLDER, IDS, NAMES, plan, scales
from tests.ablations.update_readme import our_reports, stem_of, table_of

SET_CASES = FOLDER / "set_cases.json"
TABLES = FOLDER / "tables.json"


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def case_name(name, scale, assignments):
    return " ".join([name, *(["--scale", scale] if scale else []), *(f"--set {each}" for each in assignments)])


def described(planned):
    """The rows of a plan with their first run, and a digest of everything else that a table takes from it."""
    details = [
        (row.labels, [run.run_id for run in row.runs], row.published and row.published.model_dump(mode="json"),
         sorted(row.figures), sorted(row.better), sorted(row.than))
        for row in planned.rows
    ]  # fmt: skip
    return {
        "rows": {row.name: row.runs[0].run_id for row in planned.rows},
        "details": digest(json.dumps(details, sort_keys=True, default=str)),
    }


def plan_of_case(name, scale, assignments):
    """The plan of a case, or the code of its error."""
    try:
        loaded = load_ablation(ABLATIONS / f"{name}.yaml")
        return described(expand(with_overrides(loaded, scale=scale or None, assignments=assignments)))
    except UserError as error:
        return {"error": error.code}


def table_digests(report):
    table = table_of(report)
    return {"csv": digest(table.to_csv()), "json": digest(json.dumps(table.to_json(), ensure_ascii=False))}


def write(path, pinned):
    path.write_text(json.dumps(pinned, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(IDS, {name: {scale: described(plan(name, scale)) for scale in scales(name)} for name in NAMES})
    write(SET_CASES, {case_name(*case): plan_of_case(*case) for case in CASES})
    write(TABLES, {stem_of(report): table_digests(report) for report in our_reports()})
