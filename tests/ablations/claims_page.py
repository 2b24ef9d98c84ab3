"""The claims of all files with their verdicts, as ablations/results/README.md shows them.

First a line for each table and figure of the paper, then what was found beyond it, then every claim wherever it was
measured. A claim is a statement about a task, whatever tables of the paper it is about; `ClaimResult.decided_by` says
which of the reports that make it decide.
"""

import math
from itertools import groupby

from cope_sweep.config import load_ablation
from cope_sweep.read.numbers import MISSING
from cope_sweep.read.queries.claims import UNTESTED, report_of
from cope_sweep.read.tables.render import markdown_text
from tests.helpers.shipped import shipped_files

PAPER = {
    "Table 1": "counting in the last sentence, which language models fail at; here as a task that is trained",
    "Table 2": "Flip-Flop and selective copy",
    "Table 3": "counting with 1, 3 and 5 variables",
    "Table 4": "counting with more and with fewer passes than in training",
    "Table 5": "language models of text and of code",
    "Table 6": "the prompts of Table 1 in full",
    "Table 7": "Flip-Flop, architectures and sizes",
    "Table 8": "changes of CoPE, in language models",
    "Table 9": "Tables 3 and 4 with deviations",
    "Table 10": "selective copy of Table 2 with deviations",
    "Figure 1": "a drawing of the method",
    "Figure 2": "counting, less training data",
    "Figure 3": "language models at longer contexts than in training",
    "Figure 4": "attention maps of paragraphs and sections",
    "Figure 5": "Flip-Flop, convergence",
    "Figure 6": "gates at ends of paragraphs and titles of sections",
}
"""What a table or figure of the paper is about."""
ELSEWHERE = {
    "Table 6": "see Table 1",
    "Table 9": "see Tables 3 and 4",
    "Table 10": "see Table 2",
    "Figure 1": "no numbers",
}
"""Those that have no results of their own."""
SIGNS = {"all": "✓", "weak": "(✓)", "some": "~", "none": "✗", "": "?"}
MOST_Q = 0.05
"""The largest q of a claim that is shown without brackets."""
LEGEND = (
    "✓ all claims are shown, ~ some are, or in part, ✗ none is, ? none could be tested. (✓): shown, but q > 0.05 for "
    "one of them. A claim that several reports make about a task is decided by the one with tuned rows (by one with the "
    "same hardware for all rows, if there is any), else by the one of the paper's size; if there is neither, all have to "
    "agree. Values are means over seeds, of the weakest pair of rows. p is corrected within a report (Holm), q for all "
    "claims of this page that rows are better (Benjamini and Hochberg): of claims with q ≤ 0.05, at most 5 % are false, "
    "on average. Claims by a margin are judged by intervals, without p."
)


def link_of(claim):
    """To the report of a claim."""
    return f"[{markdown_text(report_of(claim))}]({report_of(claim)}.md)"


def setting_of(claim):
    """`tuned, 2 layers of 64`."""
    return ", ".join([claim.recipe, claim.model] + ["hardware follows the row"] * claim.hardware_follows_rows)


def evidence_of(claim):
    """The numbers of a claim in its report, in a sentence."""
    texts = claim.texts
    numbers = [f"n = {texts.n}"] * (texts.n != MISSING) + [setting_of(claim)]
    if texts.difference != MISSING:
        numbers.append(f"difference {texts.difference}")
    if claim.size:
        numbers.append(f"{claim.size} (margin {texts.margin})")
    numbers += [f"{name} = {text}" for name, text in (("p", texts.p), ("q", texts.q)) if text != MISSING]
    if claim.declared:
        numbers.append(f"declared {claim.declared}")
    values = f"{claim.measure}: {claim.ours or MISSING}"
    published = f"; published: {claim.published}" if claim.published else ""
    details = markdown_text(f"{values}{published} ({', '.join(numbers)})")
    return f"**{texts.verdict}** {details} {link_of(claim)}"


def deciding(results):
    """Those of the results of one claim that decide."""
    return [each for each in results if not each.decided_by]


def by_claim(results):
    """(source, statement, task) → the results of that claim, whatever source they name themselves."""
    of_statement = {}
    for each in results:
        of_statement.setdefault((each.claim, each.task), []).append(each)
    keys = dict.fromkeys((each.source, each.claim, each.task) for each in results)
    return {key: of_statement[key[1:]] for key in keys}


def place_of(source):
    """`Figure 4` of `Figure 4 (left)`; empty without a source."""
    kind, _, number = source.partition(" ")
    return f"{kind} {number.split()[0]}" if number else ""


def is_shown(results):
    """Whether every report that decides about a claim shows it."""
    return all(each.verdict == "shown" for each in deciding(results))


def sign_of(claims):
    """The sign for some claims, each with its results in all reports."""
    decided = [each for results in claims for each in deciding(results) if each.verdict not in UNTESTED]
    if not decided:
        return SIGNS[""]
    verdicts = {each.verdict for each in decided}
    if verdicts == {"shown"}:
        return SIGNS["weak" if any((each.q or 0) > MOST_Q for each in decided) else "all"]
    return SIGNS["some" if verdicts & {"shown", "shown in part", "mixed"} else "none"]


def lines_of_paper(claims):
    """A Markdown table with a line for each table and figure of the paper."""
    lines = [
        "| | paper | about | claims shown | the first one | n | q | recipe, size | report |",
        "| - | - | - | - | - | - | - | - | - |",
    ]
    for place, about in PAPER.items():
        if place in ELSEWHERE:
            lines.append(f"| = | {place} | {about} | {ELSEWHERE[place]} | | | | | |")
            continue
        # A claim can be about both halves of a table.
        own = list({key[1:]: results for key, results in claims.items() if place_of(key[0]) == place}.values())
        leading = sorted((deciding(results)[0] for results in own), key=task_of)
        # One of each task: Table 2 is about two.
        firsts = [next(each) for _, each in groupby(leading, task_of)]
        cells = [
            sign_of(own),
            place,
            about,
            f"{sum(map(is_shown, own))} of {len(own)}",
            "<br>".join(f"{sign_of([[each]])} {headline_of(each)}" for each in firsts),
            "<br>".join(each.texts.n for each in firsts),
            "<br>".join(each.texts.q for each in firsts),
            "<br>".join(map(setting_of, firsts)),
            "<br>".join(map(link_of, firsts)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lines_beyond(claims):
    """A Markdown table with a line for each claim that is none of the paper's."""
    lines = ["| | claim | result | n | p | q | recipe, size | report |", "| - | - | - | - | - | - | - | - |"]
    beyond = [(key, results) for key, results in claims.items() if not key[0]]
    # What is shown first, the surest of it before the rest.
    order = list(SIGNS.values())
    for key, results in sorted(beyond, key=lambda each: (order.index(sign_of([each[1]])), surest(each[1]))):
        for each in deciding(results):
            cells = [
                sign_of([[each]]),
                statement(key, claims) + note_of(each),
                headline_of(each),
                *(each.texts.n, each.texts.p, each.texts.q),
                setting_of(each),
                link_of(each),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def task_of(claim):
    """What it is about."""
    return claim.task


def headline_of(claim):
    """The measure, and the values of the weakest pair."""
    return markdown_text(f"{claim.measure}: {claim.headline or MISSING}")


def statement(key, claims):
    """The text of a claim, with its task if the same is claimed of another."""
    source, text, task = key
    tasks = {each[2] for each in claims if each[:2] == (source, text)}
    return markdown_text(f"{text} ({task})" if len(tasks) > 1 else text)


def surest(results):
    """The smallest q of those that decide; those without one come last."""
    return min((each.q for each in deciding(results) if each.q is not None), default=math.inf)


def note_of(claim):
    """What qualifies a claim, why it is not shown, and what would settle it, below it."""
    return f"<br>*{markdown_text(claim.note)}*" if claim.note else ""


def lines_of_claims(claims):
    """A Markdown table with a line for each claim, and in it every report that measures it."""
    lines = ["| paper | claim | measured |", "| - | - | - |"]
    for key, results in claims.items():
        notes = dict.fromkeys(filter(None, map(note_of, results)))
        ordered = sorted(results, key=lambda each: bool(each.decided_by))
        measured = "<br>".join(map(evidence_of, ordered))
        lines.append(f"| {markdown_text(key[0] or MISSING)} | {statement(key, claims)}{''.join(notes)} | {measured} |")
    for path, text, source in untrained(claims):
        link = f"[{markdown_text(path.stem)}](../{path.name})"
        lines.append(f"| {markdown_text(source or MISSING)} | {markdown_text(text)} | **not trained** {link} |")
    return "\n".join(lines) + "\n"


def untrained(claims):
    """The claims of shipped files that no report has: (file, statement, source)."""
    measured = {key[:2] for key in claims}
    for path in shipped_files():
        content = load_ablation(path).content
        declared = [(each.source, each.text) for each in content.claims]
        declared += [(each.source, each.claim) for each in content.figures if each.has_claim]
        yield from ((path, text, source) for source, text in declared if (source, text) not in measured)


def claims_text(results):
    """The part of ablations/results/README.md about claims, from the results of all reports about them."""
    claims = by_claim(results)
    return (
        f"## The paper, table by table\n\n{LEGEND}\n\n{lines_of_paper(claims)}\n"
        f"## Beyond the paper\n\n{lines_beyond(claims)}\n"
        "## Every claim, wherever it is measured\n\nThe report that decides comes first. Difference and p: of the "
        "weakest pair of rows, with a 95 % interval that is not corrected. "
        f"[What the verdicts mean](../../docs/concepts/statistics.md).\n\n{lines_of_claims(claims)}"
    )
