"""Writes run_ids.json: `python -m tests.ablations.pin_run_ids`. The difference shows which results become invalid."""

import json

from tests.ablations.test_ablation_plans import IDS, NAMES, plan, scales

if __name__ == "__main__":
    pinned = {
        name: {scale: {row.name: row.runs[0].run_id for row in plan(name, scale).rows} for scale in scales(name)}
        for name in NAMES
    }
    IDS.write_text(json.dumps(pinned, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
