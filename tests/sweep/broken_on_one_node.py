"""A plugin that can only be imported on some nodes, like one that was not installed everywhere."""

import os

if os.environ.get("COPE_SWEEP_TEST_BROKEN_NODE"):
    raise ImportError("not installed here")
