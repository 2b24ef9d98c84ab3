"""Writes the numbers of the main README, and ablations/results/README.md, from the reports in ablations/results.

    python -m tests.ablations.update_readme

`REGIONS` are the parts of the main README. Some claims are about verdicts: they are checked, too.
"""

import functools
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from cope_sweep.read.numbers import p_text
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.queries.claims import claim_results
from cope_sweep.read.tables import Table
from cope_sweep.read.tables.claims import claim_findings
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.read.tables.layout import layout
from cope_sweep.read.tables.render import markdown_text
from cope_sweep.read.tables.rules import STUCK_SHARE
from cope_sweep.store import ParquetStore
from cope_sweep.store.results_file import file_name, run_files
from tests.ablations.claims_page import claims_text

ROOT = Path(__file__).parent.parent.parent
ABLATIONS, RESULTS = ROOT / "ablations", ROOT / "ablations" / "results"
HEADING = "# Results\n\nReports of `cope-sweep report --out`. Each has its provenance and comparisons.\n\n"
REPORTS_HEADING = "\n## Reports\n\n"
BASE = "base"
MOST_ROWS = 10
"""Rows whose values are listed for a report."""


def committed(queries):
    """The results of a folder by name. Raises NotFinishedError if one is stale."""
    for path in run_files(queries.store.root):
        name, _, scale = path.stem.partition(".")
        yield queries.results(name, scale or None)


@functools.cache
def our_queries():
    """Answers about the results of this repository. Files are read and plans are made once."""
    return Queries(ParquetStore(RESULTS), AblationFiles(ABLATIONS))


@functools.cache
def our_reports():
    """The results of this repository, read once."""
    return list(committed(our_queries()))


@functools.cache
def our_claims():
    """The claims about the results of this repository, judged once."""
    return claim_results(our_reports())


def stem_of(report):
    """The start of the names of a report's files: `quickstart`, `flip_flop.small`."""
    return file_name(report.plan).removesuffix(".parquet")


_tables = {}
"""Id of a report → its table, which keeps the report: no other gets the same id."""


def table_of(report):
    """The table of results, compared as their report is, made once."""
    if id(report) not in _tables:
        _tables[id(report)] = Table.of(report, reference(report.plan))
    return _tables[id(report)]


def overview(reports, folder):
    """A Markdown table: for each report the values of the primary metric and what they say, with a link into `folder`.

    Of more than `MOST_ROWS` rows, the lowest and the highest value.
    """
    lines = ["| ablation | scale | mean ± standard deviation over seeds | result |", "| --- | --- | --- | --- |"]
    for each in reports:
        model = table_of(each).model
        drawn = layout(model)
        column = next(i for i, header in enumerate(drawn.headers) if header.text == model.primary.title)
        named = {
            row.row: f"{markdown_text(row.short)} {cells[column].text}"
            for row, cells in zip(model.rows, drawn.rows, strict=True)
        }
        values = ", ".join(named.values())
        found = {row.row: row.metrics[model.primary.name].summary for row in model.rows}
        means = {row: summary.mean for row, summary in found.items() if summary.n}
        if len(named) > MOST_ROWS and means:
            ends = (min(means, key=means.__getitem__), max(means, key=means.__getitem__))
            values = f"{len(named)} rows, from {' to '.join(named[end] for end in ends)}"
        link = f"[{markdown_text(model.title)}]({folder}/{stem_of(each)}.md)"
        values = f"{markdown_text(model.primary.title)}: {values}"
        lines.append(f"| {link} | {each.plan.ablation.scale or BASE} | {values} | {markdown_text(model.answer)} |")
    return "\n".join(lines) + "\n"


def quick_start():
    """The table of the quick start, and what its sign means."""
    report = next(each for each in our_reports() if stem_of(each) == "quickstart")
    table = table_of(report).to_markdown().partition("\n\n")[0] + "\n"
    sign = f"\n2/2 (34–100 %): seeds that reached an error of 1 % or less, and the 95 % interval of their share. †: the seeds are stuck, with at least {STUCK_SHARE} of the errors of always answering with the most frequent token; 1/2†: one of the two.\n"
    assert "2/2 (34–100 %)" in table
    return table + (sign if "†" in table else "")


def percentage(value):
    """`0.14 %`: two digits."""
    return f"{float(f'{value:.2g}'):g} %"


class LearnedSeeds(NamedTuple):
    """The seeds of a row that learned the task."""

    seeds: str
    mean: str


class Means:
    """Means over seeds of a committed report, as text: `{copy[CoPE, dense/token_error]}`."""

    def __init__(self, stem):
        self.link = f"ablations/results/{stem}.md"
        self.report = next(each for each in our_reports() if stem_of(each) == stem)
        self.frame = self.report.frame.groupby("row").mean(numeric_only=True)

    def __getitem__(self, key):
        row, _, metric = key.rpartition(", ")
        return percentage(self.frame.at[row, metric])

    @property
    def seeds(self):
        """The number of seeds of a row."""
        return len(self.report.plan.ablation.content.seeds)

    def value(self, key):
        """A mean that is no percentage."""
        return self[key].removesuffix(" %")

    def count(self, row):
        """The largest position that a row of gates reaches in training, as a whole number."""
        return f"{self.frame.at[row, 'facts.largest_position']:.0f}"

    def learned(self, row, metric):
        """The seeds of a row that learned the task, by the ablation's limit: `5 of 7`, and their mean of a metric."""
        (cells,) = (each.metrics for each in table_of(self.report).model.rows if each.row == row)
        cell, values = cells["in_dist/token_error"], cells[metric].values
        seeds = cell.learned_seeds
        return LearnedSeeds(
            f"{len(seeds)} of {cell.summary.n}", percentage(statistics.fmean(values[seed] for seed in seeds))
        )

    def least(self, metric, rows, but):
        """The least mean among the rows that start with `rows`, but some of them."""
        found = self.frame.loc[[row for row in self.frame.index if row.startswith(rows)], metric]
        return percentage(found.drop([rows + each for each in but]).min())

    @functools.cached_property
    def findings(self):
        """What the report says about the claims about its rows, in their order."""
        return claim_findings(self.report.plan, table_of(self.report).model)

    @property
    def first_finding(self):
        """What the report says about its first claim."""
        return self.findings[0]

    def finding(self, start):
        """What the report says about the claim whose text starts like this."""
        (found,) = (each for each in self.findings if each.claim.startswith(start))
        return found

    def check_verdicts(self, **verdicts):
        """The rows have these verdicts against CoPE in the table."""
        model = table_of(self.report).model
        found = {row.row: row.metrics[model.primary.name].comparison for row in model.rows}
        for row, verdict in verdicts.items():
            assert found[row].verdict == verdict, (self.link, row)


def caption():
    """What the picture on top shows."""
    many = Means("encodings.small")
    (picture,) = (figure for figure in many.report.plan.ablation.content.figures if figure.kind == "heatmap")
    errors = {}
    for row, means in many.frame.iterrows():
        task, _, encoding = row.partition(" · ")
        errors.setdefault(encoding, []).extend(means[list(picture.columns[task])])
    assert [encoding for encoding, shown in errors.items() if max(shown) < 1] == ["CoPE + short convolution"]
    copied = many.frame.filter(like="Selective copy", axis=0)[["dense/token_error", "sparse/token_error"]].max(axis=1)
    assert [*copied.index[copied == 0]] == ["Selective copy · CoPE", "Selective copy · CoPE, 16 positions"]
    assert many.finding("In Flip-Flop of 16 times the trained length").verdict == "shown"
    return f"""\
*Only CoPE with a short convolution stays below 1 % in every column. Only CoPE on its own, with 16 positions or one per token, copies without errors when the share of blanks changes.
With 16 it makes far fewer errors in Flip-Flop's sequences 16 times as long. Small models, every row tuned alike: [its report]({many.link}).*
"""


def copying():
    """Copying with other shares of blanks."""
    many, few = map(Means, ("encodings.small", "few_positions.small"))
    sparse, dense = "sparse/token_error", "dense/token_error"
    solving = ["CoPE", "CoPE, 16 positions", "CoPE + short convolution", "CoPE + RoPE"]
    solving += ["Selective RoPE", "MapFormer-WM", "MapFormer-EM", "CARoPE"]
    others = [many.least(metric, "Selective copy · ", but=solving) for metric in (dense, sparse)]
    assert many[f"Selective copy · CoPE, {dense}"] == many[f"Selective copy · CoPE, {sparse}"] == "0 %"
    assert (
        many[f"Selective copy · CoPE, 16 positions, {dense}"]
        == many[f"Selective copy · CoPE, 16 positions, {sparse}"]
        == "0 %"
    )
    beside = many.frame.loc[
        ["Selective copy · CoPE + RoPE", "Selective copy · CoPE + short convolution"], [dense, sparse]
    ]
    most = percentage(beside.max(axis=None))
    of_shares = [many.finding(f"Of sequences with {blanks} blanks") for blanks in ("fewer", "more")]
    assert [found.verdict for found in of_shares] == ["shown", "shown"]
    return f"""\
- **Copying** with other shares of blanks ([{many.seeds} seeds, tuned alike]({many.link})): CoPE makes no errors with fewer or more blanks, whether it has 16 positions or \
one per token; combined with RoPE or a short convolution, it errs on at most {most}. CARoPE errs on at most \
{many[f"Selective copy · CARoPE, {sparse}"]} of the tokens, Selective RoPE on {many[f"Selective copy · Selective RoPE, {sparse}"]}; MapFormer copies with most seeds, and every other encoding errs on at least {others[0]} (fewer blanks) and {others[1]} (more) (encodings of the distance: p = \
{p_text(max(found.p for found in of_shares))}). CoPE does not copy more tokens than in training: of twice as many [{few["Selective copy · p_max full, in_dist/token_error@2x"]}]({few.link}) are wrong.
"""


def flip_flop():
    """Flip-Flop with more instructions to ignore."""
    flip, paper, tuned = map(Means, ("flip_flop.small", "flip_flop", "learn_or_generalise"))
    sparse = "sparse/token_error"
    tuned.check_verdicts(Absolute="worse", RoPE="no significant difference")
    assert tuned.first_finding.weakest.than.row == "RoPE"
    assert tuned.finding("Where more instructions are ignored, 16 positions").verdict == "shown"
    cope, rope, absolute, fox = (tuned.learned(row, sparse) for row in ("CoPE", "RoPE", "Absolute", "FoX"))
    for found in (flip.first_finding, paper.first_finding):
        assert (found.measure, found.verdict) == ("OOD (%)", "shown")
    return f"""\
- **Flip-Flop** with more instructions to ignore: with [one recipe]({flip.link}) CoPE errs on {flip[f"CoPE, {sparse}"]}, RoPE on {flip[f"RoPE, {sparse}"]} (p = \
{flip.first_finding.p:.1g}, {flip.seeds} seeds, 8 of them added because the others had left it open). [Tuned alike]({tuned.link}), {tuned.seeds} fresh seeds, CoPE is **not shown** to be better than RoPE: {tuned[f"CoPE, {sparse}"]} and \
{tuned[f"RoPE, {sparse}"]} (p = {tuned.first_finding.p:.2f}), absolute positions {tuned[f"Absolute, {sparse}"]}, CoPE with 16 positions {tuned[f"CoPE, 16 positions, {sparse}"]}. Of absolute \
positions {absolute.seeds} seeds learn it (and err on {absolute.mean}), of CoPE {cope.seeds} ({cope.mean}), of RoPE {rope.seeds} ({rope.mean}), of FoX {fox.seeds} ({fox.mean}). [At the paper's size]({paper.link}): \
{paper[f"CoPE, {sparse}"]}, RoPE {paper[f"RoPE, {sparse}"]}, absolute {paper[f"Absolute, {sparse}"]} (p = {p_text(paper.first_finding.p)}, {paper.seeds} seeds, two of them added after a \
look at three); published are 4.9, 20.3 and 21.7 %.
"""


def longer_flip_flop():
    """Flip-Flop on longer sequences."""
    many, one_recipe = Means("encodings.small"), Means("flip_flop_lengths.small")
    far = "in_dist/token_error@16x"
    of_recipe = one_recipe.finding("On 16 times the trained length, CoPE with 16 positions")
    of_tuned = many.finding("In Flip-Flop of 16 times the trained length")
    for found in (of_recipe, of_tuned):
        assert (found.measure, found.verdict) == ("16 × (%)", "shown")
    assert many[f"Flip-Flop · Stick-breaking, {far}"] == many[f"Flip-Flop · PaTH-FoX, {far}"]
    for row in ("CoPE", "CoPE, 16 positions"):
        assert one_recipe.learned(row, far).seeds == "6 of 6"
    return f"""\
- **Sequences 16 times as long** ([Flip-Flop, tuned alike]({many.link})): stick-breaking and PaTH-FoX {many[f"Flip-Flop · PaTH-FoX, {far}"]}, PaTH {many[f"Flip-Flop · PaTH, {far}"]}, \
CoPE with a short convolution {many[f"Flip-Flop · CoPE + short convolution, {far}"]}, DAPE {many[f"Flip-Flop · DAPE, {far}"]}, Wall {many[f"Flip-Flop · Wall, {far}"]}, FoX {many[f"Flip-Flop · FoX, {far}"]}; the best encoding of the distance, Kerple, {many[f"Flip-Flop · Kerple, {far}"]}; CoPE with 16 positions {many[f"Flip-Flop · CoPE, 16 positions, {far}"]}, with a position for every token \
{many[f"Flip-Flop · CoPE, {far}"]} (p = {p_text(of_tuned.p)}, {many.seeds} seeds). With [one recipe]({one_recipe.link}), with which all seeds learn it, \
{one_recipe[f"CoPE, 16 positions, {far}"]} and {one_recipe[f"CoPE, {far}"]} (p = {p_text(of_recipe.p)}, {one_recipe.seeds} seeds). Both claims came when other rows were known; the next were declared before. Hardware differs between the tuned rows (H100, CPUs).
"""


def few_positions():
    """Why few positions generalise."""
    few, eight = Means("few_positions.small"), "in_dist/token_error@8x"
    assert few.finding("On 8 times the trained length, 16 positions").verdict == "shown in part"  # not in MQAR
    assert few.finding("With half as many positions").verdict == "opposite"
    return f"""\
- **[Why few positions generalise]({few.link})**, 8 times as long, {few.seeds} seeds: in Flip-Flop, CoPE errs on {few[f"Flip-Flop · p_max 32, {eight}"]} with 32 positions, on {few[f"Flip-Flop · p_max 64, {eight}"]} with 64, and on \
{few[f"Flip-Flop · p_max 4, {eight}"]} with 4, which are too few. Training reaches about position {few.count("Flip-Flop · p_max full")}; where errors begin to rise is not tested. In counting, where it reaches about {few.count("Counting · p_max full")}, errors grow earlier: \
{few[f"Counting · p_max 8, {eight}"]} with 8, {few[f"Counting · p_max 16, {eight}"]} with 16, {few[f"Counting · p_max 32, {eight}"]} with 32. In MQAR no difference is shown.
"""


def counting():
    """Counting with more passes."""
    count, many, longer = Means("counting_ood.small"), Means("encodings_counting.one_machine"), "longer/token_error"
    assert (count.first_finding.measure, count.first_finding.verdict) == ("OOD longer (%)", "shown")
    of_rope = [
        pair.outcome
        for found in many.findings
        for pair in found.pairs
        if (found.measure, pair.better.short, pair.than.short) == ("More passes (%)", "CoPE", "RoPE")
    ]
    assert {*of_rope} == {""}
    return f"""\
- **Counting** with more passes than in training: with [one recipe]({count.link}) CoPE errs on {count[f"CoPE · 1, {longer}"]}, RoPE on {count[f"RoPE · 1, {longer}"]}, absolute \
and the best relative positions on {count[f"Absolute · 1, {longer}"]} and {count[f"Relative, not divided · 1, {longer}"]} (against these two p = {p_text(count.first_finding.p)}, {count.seeds} seeds). [Tuned alike]({many.link}), {many.seeds} fresh seeds, it is **not \
shown** to be better than RoPE: {many[f"Counting · CoPE, {longer}"]} and {many[f"Counting · RoPE, {longer}"]}, FoX {many[f"Counting · FoX, {longer}"]}, CoPE with 16 positions {many[f"Counting · CoPE, 16 positions, {longer}"]}.
"""


def python():
    """Language models of Python."""
    text, much_text, long_text = map(Means, ("wikitext.small", "wikitext.long", "long_contexts.small"))
    perplexity = "validation_and_test/perplexity"
    assert [found.verdict for found in text.findings[:3]] == ["shown", "not shown", "shown"]
    assert [found.verdict for found in much_text.findings[:3]] == ["shown", "not shown", "not shown"]
    assert long_text.finding("CoPE predicts text better than relative").verdict == "shown"
    return f"""\
- **[Python]({text.link})** (its standard library, {text.seeds} seeds in pairs): CoPE is better than absolute positions and, in contexts of [512 tokens]({long_text.link}), than \
relative ones (perplexity {long_text.value(f"CoPE, {perplexity}")} and {long_text.value(f"Relative, {perplexity}")}). In contexts of 128 no difference from relative ones is shown, \
not even after [ten times as many steps]({much_text.link}): {much_text.value(f"CoPE, {perplexity}")}, relative {much_text.value(f"Relative, {perplexity}")}, absolute {much_text.value(f"Absolute, {perplexity}")}.
"""


CLAIMS = (copying, flip_flop, longer_flip_flop, few_positions, counting, python)


def claims():
    """What the results say, a line for each claim."""
    return "".join(claim() for claim in CLAIMS)


def encodings():
    """A Markdown table: the built-in encodings with paper and year, by the kernels that compute them.

    It is made from the table in docs/reference/encodings.md, which says what each kernel computes.
    """
    page = (ROOT / "docs" / "reference" / "encodings.md").read_text(encoding="utf-8")
    blocks, both = "PyTorch, in blocks", "CPU and GPU"
    fused = {("native", "triton"): both, ("native", "sdpa"): both, ("native", blocks): "CPU", (blocks, blocks): "none"}
    kernels = {name: [] for name in fused.values()}
    for kind, year, paper, cpu, gpu in re.findall(
        r"^\| \[(`\w+`)\]\(\S+\) \| .*? \| (\d+) \| \[.*?\]\((\S+)\) \| (.*?) \| (.*?) \|$", page, re.MULTILINE
    ):
        kernels[fused[cpu, gpu]].append(f"[{kind}]({paper}) {year}")
    rows = [f"| {name} | {', '.join(kinds)} |" for name, kinds in kernels.items()]
    return "\n".join(["| fused kernel | encoding, paper, year |", "| --- | --- |", *rows]) + "\n"


REGIONS = {"caption": caption, "table of the quick start": quick_start, "encodings": encodings, "claims": claims}
"""What is written into the main README, by the name in its markers."""


def with_results(text):
    """The text of the main README with today's results."""
    for name, content in REGIONS.items():
        begin, end = f"<!-- {name}: made by tests/ablations/update_readme.py -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert found, f"README.md has no line {begin}"
        assert closed, f"README.md has no line {end}"
        text = f"{before}{begin}{content()}{end}{after}"
    return text


def all_results():
    """The text of ablations/results/README.md."""
    parts = [
        HEADING,
        claims_text(our_claims()),
        REPORTS_HEADING,
        re.sub(r"\(\./", "(", overview(our_reports(), ".")),
    ]
    return "".join(parts)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (RESULTS / "README.md").write_text(all_results(), encoding="utf-8")
