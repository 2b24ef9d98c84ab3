"""An S3-compatible server on the loopback interface."""

import os
import urllib.request
import uuid


def start_server(port=0):
    """A server without buckets; the caller stops it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    return server


def set_environment(patch, server):
    """Make this process and those that it starts use a server. Returns the variables."""
    host, port = server.get_host_and_port()
    credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_EC2_METADATA_DISABLED": "true"}
    variables = credentials | {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    for name, value in variables.items():
        patch.setenv(name, value)
    return variables


def make_bucket():
    """The name of a new bucket on the server of this process."""
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    urllib.request.urlopen(urllib.request.Request(f"{os.environ['AWS_ENDPOINT_URL']}/{name}", method="PUT"))
    return name
