"""Questions about ablations, runs and sweeps, and their answers: pydantic models.

A question is answered by `Queries.ask` from a store and by `Client.ask` from a service.
"""
