"""Execution of a plan: in this process, or on Ray.

    executor        the interface of both executors, and what they share: a run under its lease, the runs it continues
    local           executor in this process, without Ray: for debugging, tests, and machines with one device
    ray_executor    executor on Ray: which run is next, what became of each, which nodes can train
    tune_adapters   Tune's Searcher, Callback, Stopper and Tuner for it
    trial           a Tune trial, which trains a run with Ray Train
    shared_index    a SQLite index for the processes of other machines
    schedulers      Tune's schedulers for the schedule of an ablation
    search          Tune's search for the suggestions of Optuna
    suggestions     the rows that a search suggests during a sweep, and its record
    cluster         connects to a Ray cluster or starts one; what nodes have room for; plugin modules for its processes
    submission      what is submitted to a cluster, and its record
    submit          the Ray job that executes it
    sweep           one execution of a plan with either executor, its budget
    record          its record

No other package imports ray. Importing this package does not import it.
"""
