"""REST service and web page for ablations, result tables, runs, checkpoints, perplexity and probes.

http/    application, access, errors, caching, and the routes that read or submit ─▶ cope_sweep.read.queries
models/  the routes that ask models: batches, perplexity, probes, OpenAI protocol ─▶ cope_sweep.inference (torch, late)
page/    the web page
"""
