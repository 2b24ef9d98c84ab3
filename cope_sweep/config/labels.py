"""Labels of values: how tables and row names show what a row sets."""

import json

from cope_sweep.config.source import Json


def default_label(value: Json) -> str:
    """The label of an axis value that the file gives none: `cope+relative`, `cope(p_max=16)`, `128`."""
    if isinstance(value, list):
        return "+".join(map(default_label, value)) if value else "none"
    if isinstance(value, dict):
        kind = str(value.get("kind", ""))
        options = ", ".join(f"{key}={default_label(item)}" for key, item in value.items() if key != "kind")
        return f"{kind}({options})" if kind and options else kind or options
    return value if isinstance(value, str) else json.dumps(value)
