"""Questions about ablations, runs and sweeps, and their answers: pydantic models.

`Queries.ask` answers a question from a store. A service has a route for each, and `cope_sweep.client` a method.
"""
