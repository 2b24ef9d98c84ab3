"""A small store with models that were trained on text, and one on Flip-Flop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cope_sweep.config import expand, load_ablation
from cope_sweep.inference import Predictor
from cope_sweep.store import Store
from tests.helpers.sample_store import ServedFolders, train
from tests.helpers.sweeps import end_sweep, write_sweep
from tests.helpers.texts import write_corpus

PROSE = """\
title: Prose, tiny
base:
  task: {{kind: wikitext, corpus: small, folder: "{corpus}", tokens: 16, vocabulary: 300}}
  model: {{layers: 1, dim: 16, heads: 2}}
  train: {{steps: 12, batch: 4, lr: 1e-2}}
  evaluate: {{every: 6, sequences: 8, final_sequences: 16}}
grid:
  model.position: {{CoPE: [cope], Absolute: [absolute]}}
seeds: [0, 1]
metrics:
  - {{name: test/perplexity, label: Perplexity}}
"""
FLIP_FLOP = """\
title: Flip-Flop, tiny
base:
  task: {kind: flip_flop, pairs: 8}
  model: {layers: 1, dim: 16, heads: 2, position: [cope]}
  train: {steps: 3, batch: 4}
  evaluate: {every: 3, sequences: 8, final_sequences: 8}
metrics:
  - {name: in_dist/token_error}
"""


@dataclass(frozen=True)
class ProseStore(ServedFolders):
    """The run ids by row: `cope` and `absolute` have two seeds."""

    cope: list[str]
    absolute: list[str]
    flip_flop: str

    def predictor(self, run_id: str) -> Predictor:
        return Predictor.load(self.store.run(run_id).checkpoint, "cpu")


def build(root: Path) -> ProseStore:
    """Train the runs: a few steps each."""
    ablations = root / "ablations"
    ablations.mkdir()
    corpus = write_corpus(root / "corpus")
    (ablations / "prose.yaml").write_text(PROSE.format(corpus=corpus))
    (ablations / "flip_flop.yaml").write_text(FLIP_FLOP)
    store = Store(root / "store", create=True)
    ids: dict[str, list[str]] = {}
    for name in ("prose", "flip_flop"):
        plan = expand(load_ablation(ablations / f"{name}.yaml"))
        for row in plan.rows:
            for run in row.runs:
                train(store, run)
                ids.setdefault(f"{name} {row.name}", []).append(run.run_id)
        end_sweep(store, write_sweep(store, plan))
    cope, absolute, [flip_flop] = ids.values()
    return ProseStore(root, cope, absolute, flip_flop)
