"""Questions about ablations, runs and sweeps, and their answers: pydantic models, by subject.

`Queries.ask` answers a question from a store, `Client.ask` from a service, which has a route for each.

question     the base class; how an option is declared, for pydantic and for the command line
ablations, tables, figures, runs, sweeps    options, questions and answers
requests     requests with a body, and their answers: sweeps to execute, perplexity, probes
"""
