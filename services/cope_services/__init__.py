"""The results over REST: ablations, tables, runs, checkpoints, perplexity, probes, and a page to look at them.

routes (words in) ─▶ library (files → schemas) ─▶ catalogue (ablation files), record (the ledger), results (tables)
                  └▶ predictors (checkpoints → perplexity, probes; the only way to torch, and only when first asked)
"""
