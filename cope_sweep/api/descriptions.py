"""Descriptions of options that the command line and the REST service share. Importing this module costs nothing."""

SCALE = "A scale of the ablation: a named size, such as `small`. Default: the ablation without a scale."
COMMITTED = "Use the results that come with the ablation files (their folder `results`) instead of the store's."

# -- tables ------------------------------------------------------------------------------------------------------------

COMPARE = (
    "Compare every row with one row, named by its labels (`RoPE, layers 2`); with the published numbers (`paper`); or, "
    "as in `model.position=CoPE`, with the row that has this label and otherwise the same labels. A note below the "
    "table explains the test."
)
SORT_ROWS = "Order the rows by a metric (best first), by an axis, or by `parameters`."
ONE_LINE_PER_RUN = "One line per run instead of one per row (terminal, csv, parquet)."
STARS = "Mark significant differences with stars instead of adding a table of comparisons."
GROUP = "Group rows by this axis; the best of each group is bold. Default: the first axis."
CAPTION = "The caption, as LaTeX code. Default: the title."
LABEL = "The label. Default: tab:NAME."
NOTES = "Print the notes below the table."

# -- figures -----------------------------------------------------------------------------------------------------------

METRICS = "A metric. May be repeated. Default: the metrics of the table."
X = (
    "curves: `step` or `time`. values: an axis, another key of a run, or a fact (`facts.parameters`). Default: step; "
    "the first axis with numbers."
)
PANELS = "values, contexts, budget, heatmap: an axis; a panel for each value."
ROWS = "A row. May be repeated. Default: all."
LOG = "Use a log scale for the metrics. Default: chosen from the data."
SIZE = (
    "Width and height in inches, such as `3.25x2.5`. 3.25 fits a column of ICML, 3.03 one of ACL, 5.5 the text of "
    "NeurIPS and ICLR. Default: what the panels need."
)
FIGURE_CSV = "csv: the data behind the figure."

# -- runs --------------------------------------------------------------------------------------------------------------

FILTER = (
    "Only runs that meet this condition: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`, "
    "`facts.device=cuda`, `tags.row=CoPE` (also `tags.sweep`, `tags.ablation`, and the label of an axis). A run that "
    "lacks the key does not match. May be repeated."
)
SEARCH = (
    "Only runs that contain all of these words: at the start of the id; or in the message, the row, the ablation or "
    "its title. Case does not matter."
)
STATUS = "Only runs with this status. May be repeated."
SWEEP = "Only the runs of this sweep."
ABLATION = "Only the runs of this ablation, in plan order."
SORT_RUNS = "A key as in `filter`, or run_id, status, seed, step, created_ms. Runs without it come last."
DESCENDING = "Largest value first."
MAX_RUNS = "Maximum number of runs."
SKIPPED_RUNS = "Number of runs to skip."
CURVES = "The learning curves instead: one line for each logged value of a run."
SIDE = "Id of a run or sweep; or `ABLATION/ROW` for the row's best finished run."
