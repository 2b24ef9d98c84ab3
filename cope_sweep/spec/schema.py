"""The JSON Schema of ablation files, for editors: the file's own keys, and below `base` those of a run."""

from __future__ import annotations

from typing import Any

from cope_sweep.spec.ablation import Ablation
from cope_sweep.spec.run import RunSpec


def ablation_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of an ablation file. Nothing is required in `base`: axes may supply it."""
    schema = Ablation.model_json_schema(by_alias=True)
    run = RunSpec.model_json_schema()
    definitions = run.pop("$defs") | schema.pop("$defs")
    for key in ("required", "title"):
        run.pop(key, None)
    del run["properties"]["seed"]
    run["description"] = "What does not vary."
    schema["properties"]["base"] = run
    schema["$defs"] = definitions
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A cope-sweep ablation"}
