"""The documents name everything that exists, and everything that they show works."""

import ast
import functools
import importlib.util
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cope_benchmarks.command import app as bench
from cope_services.http.settings import Settings
from cope_services.mcp.server import AgentServer
from cope_services.mcp.training import Allowance
from typer.main import get_command
from typer.testing import CliRunner

from cope_sweep.cli.application import app as cli
from cope_sweep.config import expand, load_ablation
from cope_sweep.config.ablation import SCHEDULERS, SEARCHES
from cope_sweep.families import FAMILIES
from cope_sweep.optim import OPTIMIZERS, SCHEDULES
from cope_sweep.positions import ENCODINGS
from cope_sweep.read.figures import FIGURES
from cope_sweep.registry import BUILT_IN
from cope_sweep.store import Store
from cope_sweep.tasks import TASKS
from docs import build, generate
from tests.helpers.figure_files import svg_texts
from tests.helpers.finished_runs import finish
from tests.helpers.processes import output_of
from tests.helpers.shipped import shipped_files

ROOT = Path(__file__).parent.parent
ROOMS = (
    "ablations",
    "cope_sweep",
    "cope_sweep/cli",
    "cope_sweep/config",
    "cope_sweep/kernels",
    "cope_sweep/positions",
    "cope_sweep/read",
    "cope_sweep/store",
    "cope_sweep/sweep",
    "cope_sweep/tasks",
    "cope_sweep/tracking",
    "cope_sweep/train",
    "deploy",
    "services",
    "tests/benchmarks",
)
PROJECT_FILES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
READMES = ("README.md", *PROJECT_FILES, "ablations/results/README.md", *(f"{room}/README.md" for room in ROOMS), *PAGES)
COMMAND = get_command(cli)
BENCHES = sorted(f"bench {command}" for command in get_command(bench).commands)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def all_text():
    return "\n".join(read(name) for name in READMES if (ROOT / name).exists())


def code_blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def headings(text):
    """The anchors that GitHub gives the headings of a text."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_main_readme_is_short():
    assert len(read("README.md").splitlines()) <= 125


def test_the_main_readme_ends_with_the_files_of_the_project():
    links = re.findall(r"\]\((\S+)\)", read("README.md").splitlines()[-1])
    assert set(links) == {*PROJECT_FILES, "CITATION.cff", "LICENSE"}


@pytest.mark.parametrize("name", PROJECT_FILES)
def test_files_and_modules_that_are_named_exist(name):
    named = re.findall(r"`((?:tests|cope_sweep|services|deploy|ablations|\.ci)/[^`\s]*)`", read(name))
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
    modules = re.findall(r"python -m ([a-z_.]+)", read(name))
    assert all(importlib.util.find_spec(module) for module in modules)


def named_code(text):
    """What a text names as `file.py: function`: pairs of a path, or the end of one, and a name in that file."""
    return re.findall(r"`([\w/]+\.(?:py|js)): ([\w.]+)`", text)


@functools.cache
def definitions(path):
    """Name → its literal value (None: no literal), of the functions, classes, methods and constants of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".js":
        constants = dict(re.findall(r"\bconst (\w+) = ([\d_]+);", source))
        return dict.fromkeys(re.findall(r"\b(?:function|const|let) (\w+)", source)) | {
            name: int(number) for name, number in constants.items()
        }
    found = {}
    tree = ast.parse(source)
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[prefix + node.name] = None
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = node.value.value if isinstance(node.value, ast.Constant) else None
                found |= {prefix + target.id: value for target in targets if isinstance(target, ast.Name)}
    return found


def value_of(path, name):
    """The value of a constant that a text names. Fails if no file with this end of a path has the name."""
    files = [
        file
        for folder in ("cope_sweep", "services/cope_services")
        for file in (ROOT / folder).rglob(Path(path).name)
        if f"/{file.relative_to(ROOT / folder).as_posix()}".endswith(f"/{path}")
    ]
    found = [names[name] for names in map(definitions, files) if name in names]
    assert found, f"{path} has no {name}"
    return found[0]


@pytest.mark.parametrize("name", READMES)
def test_code_that_is_named_exists(name):
    for path, code in named_code(read(name)):
        value_of(path, code)


def test_the_clocks_of_a_metric_have_these_intervals():
    rows = [line.split("|") for line in read("cope_sweep/README.md").splitlines() if line.count("|") == 4]
    clocks = [
        (float(re.search(r"[\d.]+", often).group()), path, code)
        for _, _, often, named, _ in rows
        for path, code in named_code(named)
        if code.isupper()
    ]
    assert len(clocks) > 15
    for seconds, path, code in clocks:
        assert value_of(path, code) == seconds * (1000 if code.endswith("_MS") else 1), f"{path}: {code}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((f"]({room}/README.md", "CONTRIBUTING.md") for room in ROOMS if room != "ablations"),
        ("](docs/README.md", "README.md"),
        *(
            (f"[`{kind}`]", "docs/reference/encodings.md")
            for kind in ENCODINGS
            if ENCODINGS[kind].__module__.startswith(BUILT_IN)
        ),
        *((f"[`{kind}`]", "docs/reference/tasks.md") for kind in TASKS if TASKS[kind].__module__.startswith(BUILT_IN)),
        *((f"| `{kind}` |", "docs/reference/keys.md") for kind in [*FAMILIES, *OPTIMIZERS, *SCHEDULES]),
        *((f"### `{kind}`", "docs/reference/keys.md") for kind in [*SEARCHES, *SCHEDULERS]),
        *((f"| `{kind}` |", "docs/how-to/search.md") for kind in [*SEARCHES, *SCHEDULERS]),
        *((f"| `{kind}` |", "docs/reference/metrics-and-figures.md") for kind in FIGURES),
    ],
)
def test_every_room_and_kind(text, name):
    assert text in read(name)


def test_every_package_is_in_the_table_of_packages():
    for path in (ROOT / "cope_sweep").glob("*/__init__.py"):
        assert re.search(rf"[`/]{path.parent.name}/`", read("CONTRIBUTING.md")), (
            f"CONTRIBUTING.md does not name {path.parent.name}/"
        )


@pytest.mark.parametrize("name", generate.PAGES)
def test_the_reference_is_what_the_code_says(name):
    if name == "encodings.md" and not generate.has_all_kernels():
        pytest.skip("a C++ compiler or Triton is missing")
    page = read(f"docs/reference/{name}")
    assert generate.with_part(name, page) == page, "renew docs/reference by: python -m docs.generate"


def test_every_encoding_says_where_it_was_published():
    for kind, cls in ENCODINGS.items():
        if cls.__module__.startswith(BUILT_IN):
            assert re.fullmatch(r"arXiv \d{4}\.\d{5}|20\d\d [\w-]+/[\w-]+", cls.SOURCE), kind


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the built documents, and what the command that builds them has printed."""
    folder = tmp_path_factory.mktemp("documents") / "site"
    return folder, output_of("-m", "docs.build", str(folder), cwd=ROOT)


@pytest.fixture(scope="module")
def site(built):
    return built[0]


@pytest.mark.slow
def test_the_site_builds_and_every_link_leads_somewhere(site):
    pages = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    assert {"index.html", "docs/index.html", "docs/tutorial.html", "docs/reference/keys.html"} <= set(pages)


@pytest.mark.slow
def test_the_search_finds_the_guide_and_not_what_is_for_developers(site):
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    found = {item["location"].partition("#")[0] for item in items}
    guide = {re.sub(r"README\.md$|\.md$", ".html", name).replace("/.html", "/index.html") for name in PAGES}
    assert found == {"index.html", *guide}
    assert (site / "ablations/results/flip_flop.html").exists()


def test_language_models_find_every_page_of_the_guide_in_a_list_and_in_one_file(tmp_path):
    build.write_for_models(tmp_path)
    listed = re.findall(r"^- \[(.+?)\]\((.+?)\)(?:: (.+))?$", (tmp_path / "llms.txt").read_text(), re.MULTILINE)
    assert {path for _, path, _ in listed} == {"README.md", *PAGES, "llms-full.txt"}
    whole = (tmp_path / "llms-full.txt").read_text(encoding="utf-8")
    for title, path, sentence in listed[:-1]:
        assert len(title) > 2, path
        assert len(sentence) > 10 or "glossary" in path  # which is one table
        assert (tmp_path / path).read_text(encoding="utf-8") == read(path)
        assert f"<!-- {path} -->" in whole
    assert build.outline(read("docs/how-to/serve.md"))[0] == "The web page and the REST service"


def test_the_skill_is_a_page_and_says_when_to_use_it():
    skill = read("docs/skills/cope-sweep/SKILL.md")
    front = re.match(r"---\nname: cope-sweep\ndescription: (.+)\n---\n", skill)
    assert front is not None
    assert "Use when" in front[1]
    assert len(skill) < 5_000


def test_every_tool_of_the_server_for_agents():
    tools = AgentServer(Settings(ablations=ROOT / "ablations"), Allowance(1, 1.0)).tools
    page = read("docs/how-to/agents.md")
    documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    assert documented == set(tools)
    named = set(
        re.findall(r"`(get_\w+|list_\w+|check|plan|run|wait|stop|probe)`", read("docs/skills/cope-sweep/SKILL.md"))
    )
    assert named <= set(tools)


def test_the_measured_searches_of_agents_are_quoted():
    rows = json.loads(read("tests/benchmarks/results/agents.json"))["rows"]
    quoted = re.findall(
        r"^\| .*?: .*? \| (\d+) \(.*?\) \| (?:(\d+) \(.*?\)|–) \| \d+ \|$", read("docs/how-to/agents.md"), re.MULTILINE
    )
    expected = [(row["counts"]["false"], row["counts"]["missed"]) for row in rows.values()]
    assert [(int(false), int(missed or 0)) for false, missed in quoted] == expected


@pytest.mark.slow
def test_options_and_keys_are_words_of_the_search(site):
    separator = json.loads((site / "search.json").read_text(encoding="utf-8"))["config"]["separator"]
    words = re.split(separator, "cope-sweep plan quickstart --set model.position.cope.p_max=16")
    assert words == ["cope", "sweep", "plan", "quickstart", "--set", "model", "position", "cope", "p_max", "16"]


@pytest.mark.slow
def test_the_command_that_builds_the_site_says_how_to_open_it(built):
    site, printed = built
    last = printed.splitlines()[-1]
    assert str(site / "index.html") in last
    assert re.search(r"python3 -m http\.server .* (\d+), then http://127\.0\.0\.1:\1$", last)


def test_the_reference_has_no_ablations_of_a_reader(monkeypatch, tmp_path):
    """His files are beside the shipped ones, and Git does not track them."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "ablations", folder / "ablations", ignore=shutil.ignore_patterns("results"))
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "add", "ablations"], check=True)
    shutil.copy(folder / "ablations" / "quickstart.yaml", folder / "ablations" / "mine.yaml")
    monkeypatch.setattr(generate, "shipped_files", lambda: shipped_files(folder))
    page = read("docs/reference/ablations.md")
    assert generate.with_part("ablations.md", page) == page


def test_every_page_is_in_the_navigation():
    assert set(re.findall(r'"(docs/[\w/-]+\.md)"', read("docs/zensical.toml"))) == set(PAGES)


def test_every_environment_variable():
    paths = [
        path for room in ("cope_sweep", "services", "deploy", "tests/benchmarks") for path in (ROOT / room).rglob("*")
    ]
    sources = [
        path for path in paths if path.suffix in (".py", ".yaml", ".sh", ".sbatch", ".example", "") and path.is_file()
    ]
    named = {name for path in sources for name in re.findall(r"\bCOPE_SWEEP_[A-Z_]*[A-Z]\b", path.read_text("utf-8"))}
    assert named - set(re.findall(r"COPE_SWEEP_[A-Z_]+", read("docs/reference/environment.md"))) == set()


def test_every_exit_code():
    listed = set(re.findall(r"^\| (\d+) \|", read("docs/reference/exit-codes.md"), re.MULTILINE))
    codes = set(re.findall(r"(\d+)\s+[a-z]", COMMAND.help.partition("Exit codes:")[2]))
    assert {"0", "1", "2"} <= codes <= listed


def test_every_version_of_a_computation_is_explained():
    """Runs of an older version have other ids and are trained again: users look for the reason in the change log."""
    changed = {"`model.dropout`"}
    for registry in (TASKS, ENCODINGS, FAMILIES, OPTIMIZERS, SCHEDULES):
        for kind, cls in registry.items():
            of_base = getattr(registry.base, "version", None)
            if cls.__module__.startswith(BUILT_IN) and (cls.VERSION != 1 or getattr(cls, "version", None) != of_base):
                changed.add(f"{registry.noun} `{kind}`")
    formats = read("CHANGELOG.md").partition("## Formats")[2]
    assert changed == set(re.findall(r"^\| ([a-z ]*`[a-z_.]+`) \| \d", formats, re.MULTILINE))


def test_terms_of_the_glossary_are_sorted():
    terms = re.findall(r"^\| ([\w -]+) \|", read("docs/reference/glossary.md"), re.MULTILINE)[1:]
    assert len(terms) > 20
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("command", BENCHES)
def test_every_benchmark(command):
    assert f"cope-sweep {command}" in all_text()


@pytest.mark.parametrize("path", sorted((ROOT / "tests/benchmarks/results").glob("*.md")), ids=lambda path: path.stem)
def test_every_stored_measurement(path):
    tables = read("cope_sweep/kernels/README.md") + read("tests/benchmarks/README.md")
    assert f"results/{path.name})" in tables


def test_every_make_target():
    makefile = read("Makefile")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    explained = {"quickstart", "test", "test-all", "test-fast", "lint", "paper"}
    assert explained <= targets
    for target in explained:
        assert re.search(rf"(?:^|`)make {target}\b", read("README.md") + read("CONTRIBUTING.md"), re.MULTILINE), target
    used = {
        target for block in code_blocks(all_text(), "bash") for target in re.findall(r"^make ([a-z-]+)", block, re.M)
    }
    assert used <= targets


def test_the_paper_is_made_of_ablations_with_published_numbers():
    names = re.search(r"^TABLES := (.*)$", read("Makefile"), re.MULTILINE).group(1).split()
    assert all(load_ablation(ROOT / "ablations" / f"{name}.yaml").content.published for name in names)
    assert {"flip_flop", "selective_copy", "counting", "counting_ood", "flip_flop_architectures"} == set(names)


@pytest.mark.slow  # imports torch in a process of its own
def test_what_a_machine_without_a_network_gets_is_all_that_training_imports():
    download, install = re.findall(r"(?:-d|--find-links) wheels (.*)", read("docs/how-to/one-gpu.md"))
    assert download == install
    brought = {{"pyyaml": "yaml"}.get(name, name) for name in install.split()}
    needed_by_these = {"annotated_doc", "annotated_types", "pydantic_core", "shellingham", "typing_inspection"}
    training = "cope_sweep.cli.application, cope_sweep.cli.training, cope_sweep.train.loop"
    code = f"import sys, torch; known = {{*sys.modules}}; import {training}; print(*{{*sys.modules}} - known)"
    imported = {name.partition(".")[0] for name in output_of("-c", code).split()} - sys.stdlib_module_names
    others = {name for name in imported if not name.startswith(("_", "cope_"))}
    assert {"typer", "safetensors"} <= others <= brought | needed_by_these


@pytest.mark.parametrize("name", READMES)
def test_links_lead_to_files_and_headings(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", read(name), flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert file.exists(), f"{name} links to {target}"
        if anchor:
            assert anchor in headings(file.read_text(encoding="utf-8")), f"{name} links to {target}"


def shown_commands(text):
    """The words after `cope-sweep` of each command in the blocks of a text: also after `&&`, `--` or a variable."""
    for block in code_blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.search(r"(?<![\w/:-])cope-sweep [a-z]", line):
                continue
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            for index, word in enumerate(words):
                before = words[index - 1] if index else ";"
                if word == "cope-sweep" and re.fullmatch(r"[;|&(]+|--|\w+=.*", before):
                    yield list(
                        itertools.takewhile(lambda word: not re.fullmatch(r"[;|&()<>]+", word), words[index + 1 :])
                    )


def leaf_command(words):
    """The command that words name, and the words after its name."""
    command = COMMAND
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("name", READMES)
def test_commands_in_examples_have_these_options(name):
    for words in shown_commands(read(name)):
        command, arguments = leaf_command(words)
        command.make_context(words[0], arguments)  # raises for an unknown option; calls no command


@pytest.mark.parametrize("name", sorted({*READMES} - {"CHANGELOG.md"}))
def test_commands_in_sentences_have_these_options(name):
    without_blocks = re.sub(r"^```.*?^```", "", read(name), flags=re.DOTALL | re.MULTILINE)
    for shown in re.findall(r"`cope-sweep ([a-z][^`…]*)`", without_blocks.replace("\n", " ")):
        command, arguments = leaf_command(shown.split())
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help"}
        assert {word.partition("=")[0] for word in arguments if word.startswith("-")} <= known, shown


def test_every_python_example_is_run_by_a_test():
    """Those of the tests that are named here."""
    examples = {name: len(code_blocks(read(name), "python")) for name in READMES}
    assert {name: count for name, count in examples.items() if count} == {
        "cope_sweep/kernels/README.md": 1,  # test_the_example_of_attention_computes_what_the_reference_does
        "docs/how-to/cope-in-practice.md": 1,  # tests/inference/test_example.py
        "docs/how-to/figures-and-latex.md": 1,  # test_the_code_that_draws_learning_curves
        "docs/how-to/look-inside.md": 1,  # tests/inference/test_example.py
        "docs/how-to/notebooks.md": 3,  # tests/test_notebook.py, tests/client/test_client.py
        "docs/how-to/own-encoding.md": 2,  # test_the_encoding_of_the_guide_trains, tests/testing/test_contracts.py
        "docs/how-to/own-task.md": 2,  # the same
        "docs/how-to/trackers.md": 2,  # tests/test_notebook.py
        "docs/how-to/your-own-model.md": 3,  # test_the_code_for_a_model_of_your_own
    }


@pytest.mark.slow
def test_the_code_for_a_model_of_your_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = code_blocks(read("docs/how-to/your-own-model.md"), "python")
    for block in blocks:
        exec(block, names)
    q, k, v, attention = (names[name] for name in ("q", "k", "v", "attention"))
    torch.testing.assert_close(torch.cat((names["start"], names["token"]), dim=2), attention(q, k, v))
    table = names["model"].model.layers[0].self_attn.positions.position[0].of_layer(0)["e"]
    assert table.shape == (64, 8)


def test_texts_of_the_guide_are_valid_tasks(tmp_path):
    lines = code_blocks(read("docs/how-to/own-text.md"), "yaml")[0].splitlines()
    assert len(lines) == 4
    for line in lines:
        (tmp_path / "text.yaml").write_text(
            f"title: T\nbase: {{{line}}}\nmetrics: [{{name: validation/perplexity}}]\n".replace("{task", "{task", 1)
        )
        assert load_ablation(tmp_path / "text.yaml").content.base["task"]["kind"] == "text"


@pytest.mark.parametrize("name", READMES)
def test_ablations_in_examples_can_be_planned(name, tmp_path):
    whole = [text for text in code_blocks(read(name), "yaml") if re.search(r"^title:", text, re.MULTILINE)]
    examples = [text for text in whole if not re.search(r"^plugins:", text, re.MULTILINE)]
    if examples:
        for path in shipped_files():  # an example inherits from one of them
            shutil.copy(path, tmp_path)
    for index, text in enumerate(examples):
        path = tmp_path / f"example{index}.yaml"
        path.write_text(text)
        assert expand(load_ablation(path)).rows


def test_the_main_example_can_have_a_verdict(tmp_path, monkeypatch):
    (tmp_path / "example.yaml").write_text(code_blocks(read("README.md"), "yaml")[0])
    plan = expand(load_ablation(tmp_path / "example.yaml"))
    assert [len(row.runs) for row in plan.rows] == [5] * 3
    assert f"{len(plan.runs)} runs" in read("README.md")
    store = Store(tmp_path / "store", create=True)
    for row, error in zip(plan.rows, (0.1, 60.0, 0.1), strict=True):
        for seed, run in enumerate(row.runs):
            finish(store, run, {"in_dist/token_error": error * (1 + seed / 10)})
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["table", "example.yaml", "--compare", "CoPE", "--format", "markdown"])
    verdicts = dict(
        re.findall(
            r"^\| (CoPE[^|]*?) +\|.* (worse|better|no significant difference|descriptive) +\|", done.output, re.M
        )
    )
    assert verdicts == {"CoPE (2 positions)": "worse", "CoPE + RoPE": "no significant difference"}, done.output


def test_readme_and_tutorial_go_on_with_the_runs_of_the_quick_start(tmp_path):
    """Each asks the same question, so what a reader has trained before is finished; and each has its own title."""
    shutil.copy(ROOT / "ablations" / "quickstart.yaml", tmp_path)
    for name, file in (("mine", "README.md"), ("positions", "docs/tutorial.md")):
        assert f"`ablations/{name}.yaml`" in read(file)
        (tmp_path / f"{name}.yaml").write_text(code_blocks(read(file), "yaml")[0])
    quickstart, mine, positions = (
        expand(load_ablation(tmp_path / f"{name}.yaml")) for name in ("quickstart", "mine", "positions")
    )
    ids = [{run.run_id for run in plan.runs} for plan in (quickstart, mine, positions)]
    assert len(ids[0] & ids[1]) == len(ids[0] & ids[2]) == 2, "CoPE with the seeds 0 and 1"
    assert ids[1] < ids[2], "the tutorial adds seeds to README's question"
    assert len({plan.ablation.content.title for plan in (quickstart, mine, positions)}) == 3


def test_the_example_of_all_keys_uses_them(tmp_path):
    (tmp_path / "example.yaml").write_text(code_blocks(read("docs/reference/keys.md"), "yaml")[0])
    loaded = load_ablation(tmp_path / "example.yaml")
    assert type(loaded.content).model_fields.keys() - loaded.content.model_fields_set <= {"plugins", "inherit"}
    rows = expand(loaded).rows
    # 4 encodings × 2 sizes × tied or not, twice for RoPE and both with CoPE; without CoPE (64 positions, not tied).
    assert len(rows) == (1 + 2 + 2 + 2) * 2 * 2 - 2 * 2
    assert sum(row.published is not None for row in rows) == 4


@pytest.mark.thorough
def test_the_encoding_of_the_guide_trains(tmp_path):
    """In a process of its own, so that its encoding is registered there only."""
    text = read("docs/how-to/own-encoding.md")
    (tmp_path / "ablations").mkdir()
    shutil.copy(ROOT / "ablations" / "quickstart.yaml", tmp_path / "ablations")
    (tmp_path / "learned_decay.py").write_text(code_blocks(text, "python")[0])
    (plugins,) = re.findall(r"^export COPE_SWEEP_PLUGINS=(\w+)$", text, re.MULTILINE)
    (command, _) = re.findall(r"^cope-sweep ((?:run|table) quickstart .*)$", text, re.MULTILINE)
    sizes = ("train.steps=2", "seeds=[0]", "model.layers=1", "evaluate.sequences=8", "evaluate.final_sequences=8")
    small = [*(word for size in sizes for word in ("--set", size)), "--local", "--no-mlflow", "--json"]
    printed = output_of("-m", "cope_sweep.cli", *shlex.split(command), *small, cwd=tmp_path, COPE_SWEEP_PLUGINS=plugins)
    assert '"trained": 4' in printed


def test_the_example_of_attention_computes_what_the_reference_does():
    names = {}
    exec(code_blocks(read("cope_sweep/kernels/README.md"), "python")[0], names)
    torch.testing.assert_close(names["out"], names["expected"])


@pytest.mark.slow
def test_the_code_that_draws_learning_curves(tmp_path, monkeypatch):
    plan = expand(load_ablation(ROOT / "ablations" / "quickstart.yaml"))
    store = Store(tmp_path / "store", create=True)
    for run in plan.runs:
        finish(store, run, {metric.name: 50.0 for metric in plan.ablation.content.metrics})
    (tmp_path / "ablations").symlink_to(ROOT / "ablations")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code_blocks(read("docs/how-to/figures-and-latex.md"), "python")[0], names)
    assert names["errors"]["value"].tolist() == [50.0] * 9
    assert "CoPE, n = 2" in svg_texts((tmp_path / "quickstart.svg").read_bytes())
