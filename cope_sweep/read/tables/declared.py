"""Whether claims stood in their ablation file before their runs started.

The records of sweeps contain the ablation file as it was. The earliest one with a claim declares it. A folder of
results, which has no such records, keeps when its claims were declared in an attribute of each file of runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any

from cachetools import LRUCache
from pydantic import TypeAdapter, ValidationError

from cope_sweep.config import Plan, SpecError
from cope_sweep.config.ablation import Claim
from cope_sweep.config.source import parse_source
from cope_sweep.figures import AnyFigure, FigureSpec
from cope_sweep.store import Store, SweepRecord
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.results_file import Declaration, Declarations

NOT_RECORDED = "not recorded"
PAGE = 100
"""Number of sweeps to look up at once."""
SHORT_COMMIT = 7
MAX_CACHED = 4096
_known: LRUCache[tuple[str, str], tuple[frozenset[str] | None, Declaration]] = LRUCache(MAX_CACHED)
"""Store and sweep → what its record declares, which never changes: a record may be large."""
_lock = Lock()
ANY_FIGURE: TypeAdapter[FigureSpec] = TypeAdapter(AnyFigure)


def plan_declarations(plan: Plan, *stores: Store) -> Declarations | None:
    """Identity of a claim (`Claim.identity`) → its earliest declaration; None if no store has recorded any.

    Claims that the ablation has now, but that nobody has recorded, are not in it.
    """
    known = [found for store in stores if (found := _of_store(plan, store)) is not None]
    if not known:
        return None
    merged: Declarations = {}
    for found in known:
        for identity, declaration in found.items():
            merged[identity] = min(merged.get(identity, declaration), declaration)
    return merged


def _of_store(plan: Plan, store: Store) -> Declarations | None:
    kept = store.kept(plan)
    if kept is not None:
        return kept.declared
    if store.read_only:
        return None
    content = plan.ablation.content
    primary = content.primary_metric.name
    wanted = {claim.identity(primary, is_paired=content.paired) for claim in content.claims}
    wanted |= {figure.claim_identity for figure in content.figures if figure.has_claim}
    found: Declarations = {}
    is_recorded = False
    for identities, declaration in _sweeps(store, plan.name):
        if identities is None:
            continue
        is_recorded = True
        found |= dict.fromkeys(identities & (wanted - found.keys()), declaration)
        if wanted <= found.keys():
            break
    return found if is_recorded else None


def _sweeps(store: Store, ablation: str) -> Iterator[tuple[frozenset[str] | None, Declaration]]:
    """What `declared_by` finds in the records of an ablation's sweeps, and when they started; oldest first."""
    total = store.index.sweep_page(ablation=ablation, limit=1).total
    for end in range(total, 0, -PAGE):
        start = max(0, end - PAGE)
        page = store.index.sweep_page(ablation=ablation, limit=end - start, offset=start)
        for summary in reversed(page.sweeps):
            key = (str(store.location), summary.sweep_id)
            with _lock:
                known = _known.get(key)
            if known is None:
                with suppress(DamagedError):
                    if (record := store.sweep(summary.sweep_id)) is not None:
                        known = declared_by(record), Declaration(record.started_ms, record.git_commit or "")
                        with _lock:
                            _known[key] = known
            if known is not None:
                yield known


def declared_by(record: SweepRecord) -> frozenset[str] | None:
    """The identities of the claims in the ablation file of a sweep; None if its record does not have the file."""
    if record.data:
        return declared_in(record.data, record.scale)
    with suppress(SpecError):
        if record.file_text:  # of older versions, which have recorded the file without what it inherits
            return declared_in(parse_source(record.file_text, record.sweep_id).data, record.scale)
    return None


def declared_in(data: Mapping[str, Any], scale: str | None) -> frozenset[str]:
    """The identities of the claims in the content of an ablation file at a scale; of claims that are valid here."""
    scales = data.get("scales") or {}
    layers = [(scales.get(scale) or {}) if scale else {}, data]
    primary = next((layer["primary"] for layer in layers if layer.get("primary")), None)
    if primary is None:
        primary = next((layer["metrics"][0].get("name") for layer in layers if layer.get("metrics")), None)
    claims: Iterable[Any] = next((layer["claims"] for layer in layers if layer.get("claims") is not None), [])
    is_paired = next((layer["paired"] for layer in layers if layer.get("paired") is not None), False)
    identities = set()
    for each in claims:
        with suppress(ValidationError):  # written for another version
            claim = Claim.model_validate(each)
            if claim.metric or primary:
                identities.add(claim.identity(str(primary), is_paired=is_paired))
    for each in data.get("figures") or ():
        with suppress(ValidationError):
            figure = ANY_FIGURE.validate_python(each)
            identities |= {figure.claim_identity} if figure.has_claim else set()
    return frozenset(identities)


def declared_text(identity: str, declarations: Declarations | None, starts_ms: Mapping[int, int]) -> str:
    """`before (2026-11-24, abc1234)`, `after` or `not recorded`; empty without runs.

    `after (2026-11-24, abc1234; 3 of 8 seeds later)` if some seeds started after the declaration. `starts_ms`: seed →
    start of its first run, of the rows that the claim names.
    """
    if not starts_ms:
        return ""
    if declarations is None:
        return NOT_RECORDED
    declaration = declarations.get(identity)
    if declaration is None:
        return "after"
    day = time.strftime("%Y-%m-%d", time.gmtime(declaration.time_ms / 1000))
    commit = declaration.commit[:SHORT_COMMIT] + ("-dirty" if declaration.commit.endswith("-dirty") else "")
    place = ", ".join(filter(None, (day, commit)))
    later = sum(declaration.time_ms <= start_ms for start_ms in starts_ms.values())
    if later == len(starts_ms):
        return f"before ({place})"
    return f"after ({place}; {later} of {len(starts_ms)} seeds later)" if later else f"after ({place})"
