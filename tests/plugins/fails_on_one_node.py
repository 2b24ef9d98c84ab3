"""A plugin that fails on some nodes: like one that was not installed there, or like a library for other machines."""

import os

match os.environ.get("COPE_SWEEP_TEST_BROKEN_NODE"):
    case "import":
        raise ImportError("not installed here")
    case "exit":
        os._exit(1)
