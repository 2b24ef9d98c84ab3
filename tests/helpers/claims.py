"""Claims with verdicts, as the service answers them."""

from typing import Any

from cope_sweep.api.ablations import ClaimResult, ClaimTexts, ClaimVerdict
from cope_sweep.read.numbers import MISSING


def claim_result(verdict: ClaimVerdict, *, texts: dict[str, str] | None = None, **fields: Any) -> ClaimResult:
    """A claim of the ablation `copy` with this verdict, which has no numbers but those in `texts` and `fields`."""
    all_texts = dict.fromkeys(ClaimTexts.model_fields, MISSING) | {"verdict": verdict} | (texts or {})
    values: dict[str, Any] = {
        "claim": "CoPE copies better", "task": "selective_copy", "source": "Table 2", "ablation": "copy",
        "title": "Copy", "scale": None, "measure": "OOD (%)", "ours": "", "headline": "", "published": "", "p": None,
        "q": None, "n": None, "paired": False, "difference": None, "ci_low": None, "ci_high": None, "says": "better",
        "margin": None, "size": None, "meaning": "", "pairs": 1, "shown": int(verdict == "shown"),
        "hypothesis": "", "recipe": "one recipe", "model": "2 layers of 64", "hardware_follows_rows": False,
        "decided_by": [], "declared": "", "note": "",
    }  # fmt: skip
    return ClaimResult(verdict=verdict, texts=ClaimTexts(**all_texts), **values | fields)
