"""The table of configurations of the Triton kernels: the nearest entry, and errors of bad tables."""

import json
from dataclasses import asdict

import pytest
import torch

from cope_sweep.kernels import tuning
from cope_sweep.kernels.tuning import KERNELS, PATH, Entry, Table, configuration, incompatible, read_table

TILES = {"BLOCK_T": 64, "BLOCK_S": 32, "PLAIN_S": 64, "PLAIN_T": 64}


def entry(warps=4, **changes):
    sizes = {kernel: {**TILES, "num_warps": warps, "num_stages": 2} for kernel in KERNELS}
    given = {
        "architecture": "sm_90", "bits": 16, "contextual": True, "head_dim": 64, "p_max": 64, "tokens": 4096,
        "kernels": sizes, "source": "default", **changes,
    }  # fmt: skip
    return Entry(**given)


def nearest(entries, **changes):
    problem = {"architecture": "sm_90", "bits": 16, "contextual": True, "head_dim": 64, "p_max": 64, "tokens": 4096}
    return entries.index(Table(tuple(entries), PATH).nearest(**{**problem, **changes}))


@pytest.mark.parametrize(
    ("architecture", "index"),
    [("sm_70", 0), ("sm_80", 0), ("sm_89", 1), ("sm_90", 2), ("sm_100", 2), ("sm_120", 2), ("interpreter", 3)],
)
def test_an_unknown_architecture_uses_the_newest_older_one(architecture, index):
    entries = [entry(architecture=name) for name in ("sm_80", "sm_86", "sm_90", "interpreter")]
    assert nearest(entries, architecture=architecture) == index


@pytest.mark.parametrize(("head_dim", "index"), [(8, 1), (32, 1), (33, 2), (64, 2), (65, 0), (256, 0)])
def test_a_head_dim_between_two_uses_the_larger(head_dim, index):
    assert nearest([entry(head_dim=size) for size in (128, 32, 64)], head_dim=head_dim) == index


@pytest.mark.parametrize(
    ("p_max", "tokens", "index"),
    [
        (16, 4096, 0),
        (512, 4096, 0),  # log2 distances 3 and 3: the first
        (4096, 1024, 1),
        (64, 2048, 0),  # as far from 4096 as from 1024: the first
        (100, 1500, 2),
        (None, 4096, 3),  # counts as 1
        (1, 4096, 3),
    ],
)
def test_the_nearest_p_max_and_number_of_tokens(p_max, tokens, index):
    entries = [entry(), entry(p_max=4096), entry(tokens=1024), entry(p_max=None)]
    assert nearest(entries, p_max=p_max, tokens=tokens) == index


def test_bits_and_contextual_are_the_same_as_the_problem_s():
    entries = [entry(bits=32), entry(contextual=False), entry(head_dim=256, p_max=None, tokens=1)]
    assert nearest(entries) == 2
    with pytest.raises(ValueError, match=r"no entry for sm_90, bits 32, contextual false: add one"):
        nearest(entries, bits=32, contextual=False)
    with pytest.raises(ValueError, match="no entry for interpreter"):
        nearest(entries, architecture="interpreter")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "interpreter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("contextual", [True, False])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_the_committed_table_has_compatible_tiles_for_each_kind_of_problem(architecture, dtype, contextual, head_dim):
    def sizes(kernel):
        problem = {"architecture": architecture, "dtype": dtype, "head_dim": head_dim}
        found = configuration(kernel, **problem, contextual=contextual, p_max=64 if contextual else None, tokens=512)
        assert {"num_warps", "num_stages"} < set(found)
        return found

    assert incompatible({kernel: sizes(kernel) for kernel in KERNELS}) is None


def test_the_committed_table_is_written_as_it_is_read():
    assert read_table(PATH).to_json() == PATH.read_text(encoding="utf-8")


def test_measured_entries_replace_those_of_the_same_problems(tmp_path):
    old, other, new = entry(), entry(tokens=1024), entry(warps=8, source="measured")
    table = Table((old, other), tmp_path / "table.json").updated([new, entry(head_dim=32)])
    table.path.write_text(table.to_json())
    assert read_table(table.path) == table
    assert table.entries == (new, other, entry(head_dim=32))


def test_another_table_and_configurations_for_a_while(tmp_path, monkeypatch):
    def forward_warps():
        problem = {"architecture": "sm_90", "dtype": torch.bfloat16, "head_dim": 64, "p_max": 64, "tokens": 4096}
        return configuration("forward", **problem, contextual=True)["num_warps"]

    path = tmp_path / "table.json"
    path.write_text(Table((entry(warps=16),), path).to_json())
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    assert forward_warps() == 16
    with tuning.using_configurations(entry(warps=1).kernels):
        assert forward_warps() == 1
    assert forward_warps() == 16


def refuse(tmp_path, text, message):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        read_table(path)


def table_of(given):
    return json.dumps({"version": 1, "entries": [given]})


KERNEL_WITHOUT_WARPS = {kernel: {"BLOCK_T": 64, "BLOCK_S": 32, "num_stages": 2} for kernel in KERNELS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "hopper"}, r"entries\[0\].architecture: 'hopper' is not sm_ and a number"),
        ({"bits": 8}, r"entries\[0\].bits: 8 is not 16 or 32"),
        ({"contextual": 1}, r"entries\[0\].contextual: 1 is not true or false"),
        ({"head_dim": 0}, r"entries\[0\].head_dim: 0 is not a positive integer"),
        ({"p_max": "full"}, r"entries\[0\].p_max: 'full' is not a positive integer or null"),
        ({"tokens": True}, r"entries\[0\].tokens: True is not a positive integer"),
        ({"kernels": {}}, r"entries\[0\].kernels: {} is not an object with forward, backward_rows, backward_keys"),
        ({"kernels": KERNEL_WITHOUT_WARPS}, r"entries\[0\].kernels.forward.num_warps: None is not given"),
        ({"stages": 3}, r"entries\[0\]: needs exactly the keys architecture, .*, and has architecture, .*stages"),
    ],
)
def test_a_bad_entry_is_an_error_that_names_file_entry_and_key(tmp_path, change, message):
    refuse(tmp_path, table_of(asdict(entry()) | change), message)


@pytest.mark.parametrize(
    ("kernel", "size", "value", "message"),
    [
        ("forward", "BLOCK_T", 48, r"kernels\.forward\.BLOCK_T: 48 is not a power of 2"),
        ("forward", "BLOCK_S", 128, r"forward.PLAIN_S \(64\) has to be a multiple of forward.BLOCK_S \(128\)"),
        ("forward", "BLOCK_S", 16, r"forward.BLOCK_S \(16\) has to be a multiple of backward_rows.BLOCK_S \(32\)"),
        ("backward_rows", "BLOCK_T", 128, r"forward.BLOCK_T \(64\) has to be a multiple of backward_rows.BLOCK_T"),
        ("backward_keys", "PLAIN_T", 32, r"backward_keys.PLAIN_T \(32\) has to be a multiple of backward_keys.BLOCK_T"),
    ],
)
def test_tile_sizes_are_powers_of_2_and_fit_together(tmp_path, kernel, size, value, message):
    bad = asdict(entry())
    bad["kernels"][kernel][size] = value
    refuse(tmp_path, table_of(bad), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a table of configurations of version 1"),
        ('{"version": 2}', "not a table of configurations of version 1"),
        ('{"version": 1, "entries": []}', "a list with at least one entry is needed"),
        (Table((entry(), entry(warps=8)), PATH).to_json(), r"entries\[1\]: another entry is for the same problems"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path, text, message):
    refuse(tmp_path, text, message)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_table(tmp_path / "table.json")
