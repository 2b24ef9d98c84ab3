"""Questions about ablations, runs and sweeps, and their answers: one declaration each.

A question is answered by `Queries.ask` from a store and by `Client.ask` from a service. The routes of the service, the
methods of the client and the options of commands are made from its fields.
"""
