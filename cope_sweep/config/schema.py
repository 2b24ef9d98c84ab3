"""The JSON Schema of ablation files, for editors: the file's own keys, and the keys of a run below `base`."""

from __future__ import annotations

from typing import Any

from cope_sweep.config.ablation import Ablation
from cope_sweep.config.run import RunSpec


def ablation_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of an ablation file.

    No key of `base` is required, because an axis may supply it.
    """
    schema = Ablation.model_json_schema(by_alias=True)
    run = RunSpec.model_json_schema()
    definitions = run.pop("$defs") | schema.pop("$defs")
    for key in ("required", "title"):
        run.pop(key, None)
    del run["properties"]["seed"]
    run["description"] = "The keys of a run that do not vary."
    schema["properties"]["base"] = run
    schema["$defs"] = definitions
    # A file that inherits has the other required keys from there.
    needed = [key for key in schema["required"] if key != "title"]
    schema["required"] = ["title"]
    schema["anyOf"] = [{"required": ["inherit"]}, {"required": needed}]
    # There, null removes an inherited axis or scale.
    for part in (
        schema["properties"]["grid"],
        schema["properties"]["scales"],
        definitions["Scale"]["properties"]["grid"],
    ):
        part["additionalProperties"] = {"anyOf": [part["additionalProperties"], {"type": "null"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A cope-sweep ablation"}
