"""REST service and web page for ablations, result tables, runs, checkpoints, perplexity and probes.

routes ─▶ cope_sweep.read.queries (ablations, runs, sweeps, curves)
       ├▶ tables (rendered tables and curves, cached)
       └▶ predictors (perplexity and probes of checkpoints; imports torch on the first request)
"""
