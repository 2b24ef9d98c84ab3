"""lm-evaluation-harness, unmodified, against a server: its numbers are those of our own evaluation.

Needs the command `lm_eval` of the extra `lm-eval`, on the PATH or in this environment; else the tests are skipped.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cope_sweep.inference import Predictor, windows
from tests.services.prose_store import ProseStore

COMMAND = shutil.which("lm_eval", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="lm_eval is not installed: pip install -e '.[lm-eval]'"),
]

TEXTS = [
    "the cat is a species",
    "naïve 日本 , lobster of the European \n the cat . \n a species of the cat is a lobster of the European",
    "a",
]
CHOICES = [
    {"question": "the cat is a", "choices": [" species", " lobster", " ,"], "gold": 0},
    {"question": "European lobster", "choices": [" is", " of", " 日本"], "gold": 1},
]
ROLLING = """\
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}, {{metric: byte_perplexity}}]
"""
CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
CONTEXT = 16


def run_lm_eval(folder: Path, url: str, max_length: int) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The results by task, and the samples of each task in order."""
    arguments = f"base_url={url}/v1/completions,num_concurrent=3,max_length={max_length}"
    command = [str(COMMAND), "--model", "local-completions", "--model_args", arguments,
               "--tasks", "rolling,choice", "--include_path", str(folder), "--batch_size", "2", "--log_samples",
               "--output_path", str(folder / "output")]  # fmt: skip
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    [results] = (folder / "output").rglob("results_*.json")
    samples = {}
    for task in ("rolling", "choice"):
        [file] = (folder / "output").rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda line: line["doc_id"])
    return json.loads(results.read_text())["results"], samples


def write_task(folder: Path, name: str, template: str, documents: list[dict[str, Any]]) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / f"{name}.yaml").write_text(template.format(file=file))


def nll(predictor: Predictor, text: str) -> float:
    """As lm-eval's windows: disjoint ones, of which the last reaches back to be as long as the others."""
    tokens_T = predictor.text_tokens(text)
    last = (
        len(tokens_T) - 1 - (len(tokens_T) - 2) % CONTEXT - 1
    )  # the place of the last window's first scored token, − 1
    whole, rest = tokens_T[: last + 1], tokens_T[max(0, len(tokens_T) - 1 - CONTEXT) :]
    scored = [scores.log_probabilities_N.sum() for scores in predictor.score_windows(windows(whole, CONTEXT, CONTEXT, whole))] if len(whole) > 1 else []  # fmt: skip
    [end] = predictor.log_probabilities([rest])
    return -float(sum(scored) + end[-(len(tokens_T) - 1 - last) :].sum())


def test_the_numbers_are_our_own(prose_client: httpx.Client, prose: ProseStore, tmp_path: Path) -> None:
    # Absolute positions: nothing beyond the context can be read, not even for the token that lm-eval does not want.
    run_id = prose.absolute[0]
    predictor = prose.predictor(run_id)
    write_task(tmp_path, "rolling", ROLLING, [{"text": text} for text in TEXTS])
    write_task(tmp_path, "choice", CHOICE, CHOICES)
    # lm-eval subtracts one token for its generated one, and one of a prompt is not scored: windows of CONTEXT.
    results, samples = run_lm_eval(tmp_path, f"{prose_client.base_url}/openai/{run_id}", CONTEXT + 2)
    check_rolling(predictor, results["rolling"], samples["rolling"])
    check_choices(predictor, results["choice"], samples["choice"])


def check_rolling(predictor: Predictor, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    expected = [nll(predictor, text) for text in TEXTS]
    assert len(predictor.text_tokens(TEXTS[1])) > 2 * CONTEXT  # several windows
    for sample, document_nll in zip(samples, expected, strict=True):
        assert float(sample["filtered_resps"][0]) == pytest.approx(-document_nll, rel=1e-5)
    size_bytes = sum(len(text.encode()) for text in TEXTS)
    assert results["bits_per_byte,none"] == pytest.approx(sum(expected) / size_bytes / math.log(2), rel=1e-5)
    # Texts of one window: lm-eval's windows are those of our own evaluation.
    short = [text for text in TEXTS if len(predictor.text_tokens(text)) <= CONTEXT + 1]
    assert len(short) == 2
    for text in short:
        assert nll(predictor, text) == pytest.approx(predictor.text_perplexity(text).nll_sum)


def check_choices(predictor: Predictor, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    correct, greedy = 0, []
    for sample, document in zip(samples, CHOICES, strict=True):
        scores = []
        for (log_p, is_greedy), choice in zip(sample["filtered_resps"], document["choices"], strict=True):
            context = predictor.vocabulary.encode(document["question"])
            both = predictor.vocabulary.encode(document["question"] + choice)
            assert both[: len(context)].tolist() == context.tolist()
            scores.append(predictor.log_probabilities([both])[0][len(context) :].sum())
            with torch.no_grad():
                best_T = predictor.model(torch.from_numpy(both[None]))[0].argmax(-1)
            assert float(log_p) == pytest.approx(scores[-1], rel=1e-5)
            greedy.append(best_T[len(context) - 1 : -1].tolist() == both[len(context) :].tolist())
            assert str(is_greedy) == str(greedy[-1])
        correct += max(range(3), key=scores.__getitem__) == document["gold"]
    assert results["acc,none"] == correct / len(CHOICES)
