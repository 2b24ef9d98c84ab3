"""Execution of a plan: in this process, or on Ray.

    executor        the interface of both executors, what they share (a run under its lease, the runs it continues), and
                    the one in this process, without Ray: for debugging, tests, and machines with one device
    ray_executor    executor on Ray: which run is next, what became of each, which nodes can train
    tune_adapters   Tune's Searcher, Callback, Stopper, schedulers and Tuner for it
    trial           a Tune trial, which trains a run with Ray Train
    search          the rows that a search suggests during a sweep, with Optuna's sampler
    cluster         connects to a Ray cluster or starts one; what nodes have room for, and what they are sent
    jobs            a sweep that is submitted to a cluster as a Ray job, and its record
    sweep           one execution of a plan with either executor, its budget and its record

No other package imports ray. Importing this package does not import it.
"""
