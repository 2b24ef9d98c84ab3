"""Writes the numbers of the main README, and ablations/results/README.md, from the reports in ablations/results.

    python -m tests.ablations.update_readme

`REGIONS` are the parts of the main README. Some claims are about verdicts: they are checked, too.
"""

import functools
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.tables import Table
from cope_sweep.read.tables.claims import claim_findings
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.read.tables.layout import layout
from cope_sweep.read.tables.render import markdown_text
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


def committed(results=RESULTS, ablations=ABLATIONS):
    """The results of a folder by name. Raises NotFinishedError if one is stale."""
    queries = Queries(ParquetStore(results), AblationFiles(ablations))
    for path in run_files(results):
        name, _, scale = path.stem.partition(".")
        yield queries.results(name, scale or None)


@functools.cache
def our_reports():
    """The results of this repository, read once."""
    return list(committed())


def stem_of(report):
    """The start of the names of a report's files: `quickstart`, `flip_flop.small`."""
    return file_name(report.plan).removesuffix(".parquet")


def table_of(report):
    """The table of results, compared as their report is."""
    return Table.of(report, reference(report.plan))


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
    sign = "\n2/2 (34–100 %): seeds that reached an error of 1 % or less, and the 95 % interval of their share. †: the seeds do no better than a rule that always gives the most frequent answer; 1/2†: one of the two.\n"
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

    def place(self, row, rows, metric):
        """The place of a row by a metric among those that start with `rows`: 1 for the lowest mean."""
        found = self.frame.loc[[each for each in self.frame.index if each.startswith(rows)], metric]
        return int(found.rank()[row])

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


def copying():
    """Copying with other shares of blanks."""
    copy, many, few = map(Means, ("selective_copy.small", "encodings.small", "few_positions.small"))
    sparse, wrong = "sparse/token_error", "in_dist/token_error"
    copy.check_verdicts(RoPE="worse", Absolute="worse")
    for metric in ("dense/sequence_error", "sparse/sequence_error"):
        assert copy[f"CoPE, {metric}"] == "0 %", metric
        assert copy[f"RoPE, {metric}"] == copy[f"Absolute, {metric}"] == "100 %", metric
    solving = [
        "CoPE",
        "CoPE, 16 positions",
        "CoPE + short convolution",
        "CoPE + RoPE",
        "Selective RoPE",
        "MapFormer-WM",
        "MapFormer-EM",
        "CARoPE",
    ]
    others = many.least(sparse, "Selective copy · ", but=solving)
    dense = many.least("dense/token_error", "Selective copy · ", but=solving)
    mapformer_wm, mapformer_em = (many.learned(f"Selective copy · MapFormer-{kind}", sparse) for kind in ("WM", "EM"))
    other_shares, more_blanks = (many.finding(f"Of sequences with {n} blanks") for n in ("fewer", "more"))
    assert other_shares.verdict == more_blanks.verdict == "shown"
    assert f"{other_shares.p:.3f}" == f"{more_blanks.p:.3f}" == "0.005"
    return f"""\
- [Copying with other shares of blanks]({copy.link}): CoPE gets {copy["CoPE, sparse/sequence_error"]} of the sequences wrong, \
RoPE and absolute positions {copy["RoPE, sparse/sequence_error"]} (5 seeds). [34 rows, tuned alike]({many.link}): CoPE 0 % of the tokens wrong with fewer and with more blanks, with a short convolution \
{many["Selective copy · CoPE + short convolution, dense/token_error"]} and \
{many[f"Selective copy · CoPE + short convolution, {sparse}"]}, CoPE + RoPE \
{many["Selective copy · CoPE + RoPE, dense/token_error"]} and {many[f"Selective copy · CoPE + RoPE, {sparse}"]}, Selective RoPE \
{many["Selective copy · Selective RoPE, dense/token_error"]} and {many[f"Selective copy · Selective RoPE, {sparse}"]}, \
CARoPE {many["Selective copy · CARoPE, dense/token_error"]} and {many[f"Selective copy · CARoPE, {sparse}"]}, MapFormer-WM and -EM \
{mapformer_wm.mean} and {mapformer_em.mean} with more blanks in the {mapformer_wm.seeds} and {mapformer_em.seeds} seeds that learned to copy \
({many[f"Selective copy · MapFormer-WM, {sparse}"]} and {many[f"Selective copy · MapFormer-EM, {sparse}"]} in all), all others at least {dense} and {others} (against encodings of the distance p = 0.005, 7 seeds; ten of the rows from CPUs, 24 from an H100). CoPE does not copy more tokens than in training: \
of twice as many [{few[f"Selective copy · p_max full, {wrong}@2x"]}]({few.link}) are wrong.
"""


def flip_flop():
    """Flip-Flop with more instructions to ignore."""
    flip, paper, many, elsewhere = map(Means, ("flip_flop.small", "flip_flop", "encodings.small", "output_gates.small"))
    longer, sparse = Means("learn_or_generalise"), "sparse/token_error"
    longer.check_verdicts(Absolute="worse", RoPE="no significant difference", Kerple="no significant difference")
    assert longer.first_finding.weakest.than.row == "RoPE"
    assert longer.finding("Where more instructions are ignored, 16 positions").verdict == "shown"
    cope, absolute, fox = (longer.learned(row, sparse) for row in ("CoPE", "Absolute", "FoX"))
    assert (longer.learned("RoPE", sparse).seeds, fox.mean) == (cope.seeds, "0 %")
    flip.check_verdicts(RoPE="worse", Absolute="worse")  # in distribution
    out_of_distribution = flip.first_finding
    assert (out_of_distribution.measure, out_of_distribution.verdict) == ("OOD (%)", "shown")
    tuned_flip = many.finding(
        "Where more instructions are ignored than in training, CoPE makes fewer errors than absolute"
    )
    assert (tuned_flip.measure, tuned_flip.verdict) == ("Sparse (%)", "not shown")
    tuned_rope = many.learned("Flip-Flop · RoPE", sparse)
    for row in ("CoPE", "RoPE", "Absolute"):
        assert paper.learned(row, sparse).seeds == "5 of 5"
    of_seeds = paper.report.frame.loc[paper.report.frame["row"] == "CoPE", sparse]
    few_errors, worst_seed = (of_seeds <= 0.01).sum(), percentage(of_seeds.max())
    assert few_errors == len(of_seeds) - 1
    at_paper_size = paper.first_finding
    assert (at_paper_size.measure, at_paper_size.verdict) == ("OOD (%)", "shown")
    with_gates = elsewhere.finding("Where more instructions")
    assert with_gates.weakest.than.row == "RoPE · output gate · QK norm"
    assert elsewhere.finding("On sequences of 4 times the trained length, FoX").verdict == "shown"
    return f"""\
- [Flip-Flop, with more instructions to ignore than in training]({flip.link}), one recipe: CoPE {flip[f"CoPE, {sparse}"]}, RoPE \
{flip[f"RoPE, {sparse}"]}, absolute {flip[f"Absolute, {sparse}"]} \
(p = {out_of_distribution.p:.1g}, {flip.seeds} seeds). [Tuned alike]({longer.link}), {longer.seeds} fresh seeds, that CoPE is better than RoPE is **not shown**: CoPE \
{longer[f"CoPE, {sparse}"]}, RoPE {longer[f"RoPE, {sparse}"]} (p = {longer.first_finding.p:.2f}), absolute {longer[f"Absolute, {sparse}"]}, Kerple {longer[f"Kerple, {sparse}"]}, \
CoPE with 16 positions {longer[f"CoPE, 16 positions, {sparse}"]}. Absolute positions learn the task with {absolute.seeds} seeds, CoPE and RoPE with {cope.seeds}, FoX with {fox.seeds}, \
which then makes no error. With [fewer steps and rates]({many.link}) it is not shown, either: {many[f"Flip-Flop · CoPE, {sparse}"]} and {many[f"Flip-Flop · RoPE, {sparse}"]} \
(p = {tuned_flip.p:.2f}, {many.seeds} seeds; {tuned_rope.seeds} of RoPE learned the task). [At the paper's size]({paper.link}): CoPE {paper[f"CoPE, {sparse}"]} ({few_errors} of {paper.seeds} seeds at 0.01 % or less, one at \
{worst_seed}), RoPE {paper[f"RoPE, {sparse}"]}, absolute {paper[f"Absolute, {sparse}"]} (p = {at_paper_size.p:.3f}, 5 seeds, two of them added \
after a look at three; all learned the task); published are 4.9, 20.3 and 21.7 %. With [a gate on \
attention's output and QK norm]({elsewhere.link}), RoPE's error is {elsewhere[f"RoPE · output gate · QK norm, {sparse}"]} (without them \
{elsewhere[f"RoPE · no gate · no norm, {sparse}"]}): no significant difference from CoPE's {elsewhere[f"CoPE · no gate · no norm, {sparse}"]} (p = {with_gates.p:.2f}, \
{elsewhere.seeds} seeds). FoX: {elsewhere[f"FoX · no gate · no norm, {sparse}"]}.
"""


def longer_flip_flop():
    """Flip-Flop of 16 times the length."""
    many, lengths, far = Means("encodings.small"), Means("flip_flop_lengths.small"), "in_dist/token_error@16x"
    fewer_positions = lengths.finding("On 16 times the trained length, CoPE with 16 positions")
    assert (fewer_positions.measure, fewer_positions.verdict) == ("16 × (%)", "shown")
    far_apart = many.finding("In Flip-Flop of 16 times the trained length")
    assert (far_apart.measure, far_apart.verdict) == ("16 × (%)", "shown")
    sixteen = many.learned("Flip-Flop · CoPE, 16 positions", far)
    place = many.place("Flip-Flop · CoPE", "Flip-Flop · ", far)
    for row in ("CoPE", "CoPE, 16 positions"):
        assert lengths.learned(row, far).seeds == "6 of 6"
    return f"""\
- [Flip-Flop, sequences 16 times as long]({many.link}), tuned alike: stick-breaking {many[f"Flip-Flop · Stick-breaking, {far}"]}, PaTH \
{many[f"Flip-Flop · PaTH, {far}"]}, PaTH-FoX {many[f"Flip-Flop · PaTH-FoX, {far}"]}, Wall {many[f"Flip-Flop · Wall, {far}"]}, CoPE with a short convolution {many[f"Flip-Flop · CoPE + short convolution, {far}"]}, DAPE \
{many[f"Flip-Flop · DAPE, {far}"]}, FoX {many[f"Flip-Flop · FoX, {far}"]}, CoPE with 16 positions {many[f"Flip-Flop · CoPE, 16 positions, {far}"]} \
({sixteen.mean} in the {sixteen.seeds} seeds that learned the task); CoPE with a position for every token is the {place}th of 34 rows, with \
{many[f"Flip-Flop · CoPE, {far}"]} (against 16 positions p = {far_apart.p:.3f}). With [one recipe]({lengths.link}), with which all seeds of both learn \
it, {lengths[f"CoPE, 16 positions, {far}"]} and {lengths[f"CoPE, {far}"]} (p = {fewer_positions.p:.3f}, 6 seeds).
"""


def few_positions():
    """Why few positions generalise."""
    few, eight = Means("few_positions.small"), "in_dist/token_error@8x"
    assert few.finding("On 8 times the trained length, 16 positions").verdict == "shown in part"  # not in MQAR
    cut = few.finding("On 8 times the trained length, a table that is cut to 16 positions after training makes")
    assert cut.verdict == "shown in part"
    assert few.finding("On the trained length, the cut").verdict == "shown"
    assert few.finding("With half as many positions").verdict == "opposite"
    return f"""\
- [Why few positions generalise]({few.link}), 8 times as long, 10 seeds: in Flip-Flop errors rise beyond the positions that training reaches, about \
{few.count("Flip-Flop · p_max full")}: {few[f"Flip-Flop · p_max 32, {eight}"]} with 32 positions, {few[f"Flip-Flop · p_max 64, {eight}"]} with 64; the full table, \
cut to 16 after training, {few[f"Flip-Flop · p_max full, cut16/{eight}"]}. In counting they grow before: {few[f"Counting · p_max 8, {eight}"]} with 8, \
{few[f"Counting · p_max 16, {eight}"]} with 16, {few[f"Counting · p_max 32, {eight}"]} with 32. In MQAR, where training reaches 4, tables of 4 and of 9 positions err \
alike: {few[f"MQAR · p_max 4, {eight}"]} and {few[f"MQAR · p_max full, {eight}"]}.
"""


def counting():
    """Counting with more passes, and with more variables."""
    count, names, five = map(Means, ("counting_ood.small", "counting.several_variables", "counting.five_variables"))
    longer, wrong = "longer/token_error", "in_dist/token_error"
    more_passes = count.first_finding
    assert (more_passes.measure, more_passes.verdict) == ("OOD longer (%)", "shown")
    assert names.first_finding.verdict == five.first_finding.verdict == "shown"
    assert "No significant difference from CoPE: RoPE; Relative, not divided;" in table_of(five.report).model.answer
    five_learned = five.learned("CoPE · 5", wrong)
    return f"""\
- [Counting, with more passes than in training]({count.link}): CoPE {count[f"CoPE · 1, {longer}"]}, absolute \
{count[f"Absolute · 1, {longer}"]}, RoPE {count[f"RoPE · 1, {longer}"]}, the best variant of relative {count[f"Relative, not divided · 1, {longer}"]}; CoPE is better \
than absolute and relative positions (p = {more_passes.p:.3f}, 6 seeds). [With 3 variables]({names.link}), in distribution: CoPE \
{names[f"CoPE · 3, {wrong}"]}, absolute {names[f"Absolute · 3, {wrong}"]}, RoPE {names[f"RoPE · 3, {wrong}"]}, the best variant of relative \
{names[f"Relative, not divided · 3, {wrong}"]}; [with 5]({five.link}) {five[f"CoPE · 5, {wrong}"]} ({five_learned.mean} in the {five_learned.seeds} seeds that learned it), \
{five[f"Absolute · 5, {wrong}"]}, {five[f"RoPE · 5, {wrong}"]}, {five[f"Relative, not divided · 5, {wrong}"]}; of the three, only absolute positions are \
significantly worse. An operation is one token there, so that no name has to be bound.
"""


def longer_counting():
    """Counting on longer sequences, 14 encodings."""
    by_length = Means("encodings_counting.one_machine")
    longer, wrong = "longer/token_error", "in_dist/token_error"
    for measure, outcomes in {"More passes (%)": {""}, "Fewer passes (%)": {"opposite"}, "1 × (%)": {""}}.items():
        pairs = [pair for found in by_length.findings for pair in found.pairs if found.measure == measure]
        assert {pair.outcome for pair in pairs if (pair.better.short, pair.than.short) == ("CoPE", "RoPE")} == outcomes
    of_cope = by_length.report.frame[by_length.report.frame["row"] == "Counting · CoPE"]
    (counting_row,) = (row for row in table_of(by_length.report).model.rows if row.row == "Counting · CoPE")
    learned_counting = of_cope[~of_cope["seed"].isin(counting_row.metrics[wrong].stuck)]
    others_of_length = {
        metric: by_length.least(metric, "Counting · ", but=["CoPE", "CoPE, 16 positions", "FoX"])
        for metric in (f"{wrong}@8x", longer)
    }
    return f"""\
- [Counting, 14 encodings]({by_length.link}), sequences 8 times as long: FoX {by_length[f"Counting · FoX, {wrong}@8x"]}, CoPE with 16 positions \
{by_length[f"Counting · CoPE, 16 positions, {wrong}@8x"]}, with a position for every token {by_length[f"Counting · CoPE, {wrong}@8x"]}, others at \
least {others_of_length[f"{wrong}@8x"]}. With more passes: {by_length[f"Counting · FoX, {longer}"]}, \
{by_length[f"Counting · CoPE, 16 positions, {longer}"]}, {by_length[f"Counting · CoPE, {longer}"]}, and {others_of_length[longer]} (10 fresh seeds on one machine). \
That CoPE is better with more passes, as [7 seeds on two kinds of machine]({Means("encodings_counting").link}) suggested, is **not shown**: \
{len(of_cope) - len(learned_counting)} of its {len(of_cope)} seeds did not learn the task (the others: {percentage(learned_counting[longer].mean())}). With fewer passes RoPE is better.
"""


def last_sentence():
    """Counting a word in the last sentence."""
    sentences, first_sentences = Means("last_sentence.constant_rate"), Means("last_sentence.small")
    longer = "longer/token_error"
    alone, beside_rope = (sentences.findings[n] for n in (0, 2))
    for found in (alone, beside_rope):
        assert (found.measure, found.verdict) == ("OOD longer (%)", "shown")
    assert first_sentences.finding("With longer sentences").verdict == "not shown"
    return f"""\
- [Counting a word in the last sentence]({sentences.link}), where sentences are longer than in training: CoPE \
{sentences[f"CoPE, {longer}"]}, RoPE {sentences[f"RoPE, {longer}"]}, relative {sentences[f"Relative, {longer}"]}, absolute \
{sentences[f"Absolute, {longer}"]} (p = {alone.p:.3f}, 8 seeds); CoPE beside RoPE {sentences[f"CoPE + RoPE, {longer}"]} (p = {beside_rope.p:.3f}). \
It is a second recipe: with [the first]({first_sentences.link}) CoPE had {first_sentences[f"CoPE, {longer}"]}, RoPE {first_sentences[f"RoPE, {longer}"]}.
"""


def python():
    """Language models of Python."""
    text, much_text, long_text = map(Means, ("wikitext.small", "wikitext.long", "long_contexts.small"))
    perplexity = "validation_and_test/perplexity"
    assert [found.verdict for found in text.findings[:3]] == ["shown", "not shown", "shown"]
    assert [found.verdict for found in much_text.findings[:3]] == ["shown", "not shown", "not shown"]
    assert long_text.finding("CoPE predicts text better than relative").verdict == "shown"
    return f"""\
- [Python]({text.link}) (its standard library, 8 seeds in pairs): CoPE is better than absolute positions and, in contexts of [512 tokens]({long_text.link}), than relative \
ones (perplexity {long_text.value(f"CoPE, {perplexity}")} and {long_text.value(f"Relative, {perplexity}")}); in contexts of 128 it does not differ significantly from \
them, and with them it is a little better. After [ten times as many steps]({much_text.link}), in contexts of 128, only the first is left: perplexity \
{much_text.value(f"CoPE, {perplexity}")}, absolute {much_text.value(f"Absolute, {perplexity}")}, relative \
{much_text.value(f"Relative, {perplexity}")}.
"""


def tasks_of_2026():
    """Tasks of 2026."""
    young, walk = Means("tasks_2026.small"), Means("grid_navigation_1d.small")
    last, objects, unmapped, wrong, longer = (
        "in_dist/last_error",
        "in_dist/object_error",
        "in_dist/map_error",
        "in_dist/token_error",
        "longer/token_error",
    )
    return f"""\
- [Tasks of 2026]({young.link}), one recipe, {young.seeds} seeds. The last of 8 products that do not commute, one layer: MapFormer-WM {young[f"Products in S3 · MapFormer-WM, {last}"]} \
wrong, Selective RoPE {young[f"Products in S3 · Selective RoPE, {last}"]}, PaTH {young[f"Products in S3 · PaTH, {last}"]} (seeds differ widely), CoPE {young[f"Products in S3 · CoPE, {last}"]}, none \
{young[f"Products in S3 · None, {last}"]}. Values that were updated: PaTH {young[f"Updates · PaTH, {wrong}"]}, MapFormer-WM {young[f"Updates · MapFormer-WM, {wrong}"]}, CoPE \
{young[f"Updates · CoPE, {wrong}"]}, FoX and RoPE {young[f"Updates · RoPE, {wrong}"]}. Brackets of longer sequences: stick-breaking {young[f"Brackets · Stick-breaking, {longer}"]}, \
MapFormer-WM {young[f"Brackets · MapFormer-WM, {longer}"]}, CoPE {young[f"Brackets · CoPE, {longer}"]}, RoPE {young[f"Brackets · RoPE, {longer}"]}. \
[Objects of a walk]({walk.link}), {walk.seeds} seeds: MapFormer-WM {walk[f"MapFormer-WM, rank 1, {objects}"]} wrong, CoPE {walk[f"CoPE, {objects}"]}, RoPE {walk[f"RoPE, {objects}"]} (few seeds do \
better than a rule without a map; where it finds nothing, {walk[f"MapFormer-WM, rank 1, {unmapped}"]}, {walk[f"CoPE, {unmapped}"]} and {walk[f"RoPE, {unmapped}"]}).
"""


CLAIMS = (
    copying,
    flip_flop,
    longer_flip_flop,
    few_positions,
    counting,
    longer_counting,
    last_sentence,
    python,
    tasks_of_2026,
)


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


REGIONS = {"table of the quick start": quick_start, "encodings": encodings, "claims": claims}
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
        claims_text(our_reports()),
        REPORTS_HEADING,
        re.sub(r"\(\./", "(", overview(our_reports(), ".")),
    ]
    return "".join(parts)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (RESULTS / "README.md").write_text(all_results(), encoding="utf-8")
