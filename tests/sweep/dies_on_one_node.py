"""A plugin that ends the processes of some nodes, like a library that was built for other machines."""

import os

if os.environ.get("COPE_SWEEP_TEST_BROKEN_NODE"):
    os._exit(1)
