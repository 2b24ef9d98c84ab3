"""REST service and web page for ablations, result tables, runs, checkpoints, perplexity and probes.

routes ─▶ library (files → schemas) ─▶ catalogue (ablation files), record (run folders)
       ├▶ tables (rendered tables and curves, cached)
       └▶ predictors (perplexity and probes of checkpoints; imports torch on the first request)
"""
