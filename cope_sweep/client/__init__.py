"""A typed client of the REST service.

    from cope_sweep.client import Client

    with Client("http://127.0.0.1:8000") as client:
        sweep = client.submit(ablation="quickstart", set=["train.steps=100"])
        for progress in client.events(sweep.sweep_id):
            print(progress.counts)
        print(client.rendered_table("quickstart", "markdown").decode())

`AsyncClient` has the same methods as coroutines and asynchronous iterators.

    calls      the requests: method, path, parameters, and how an answer is read
    policy     which requests are repeated, after which time
    events     server-sent events
    downloads  files that are resumed and checked
    blocking   Client
    concurrent AsyncClient

Importing this package imports neither torch nor ray nor sqlalchemy.
"""

from cope_sweep.client.blocking import Client
from cope_sweep.client.concurrent import AsyncClient
from cope_sweep.client.errors import ConnectionFailed, DownloadError, ServiceError

__all__ = ["AsyncClient", "Client", "ConnectionFailed", "DownloadError", "ServiceError"]
