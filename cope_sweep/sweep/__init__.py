"""Execution of a plan: in this process, or on Ray.

    sweep           one execution of a plan with either executor, its budget and its record
    driver, leases  which run is next, who has its lease, and how it has ended
    executor        the interface of both executors; local_executor is the one without Ray
    ray_executor    the executor on Ray: connects to a cluster; ray_sweep hands runs to trials and follows them
    tune_adapters   Tune's Searcher, Callback, Stopper, schedulers and Tuner
    trial           a Tune trial, which trains a run with Ray Train; stop_requests asks it to end
    search          the rows that Optuna suggests
    cluster         connects to a Ray cluster or starts one; what its nodes have
    jobs            a sweep that is submitted to a cluster as a Ray job, and its record

No other package imports ray. Importing this package does not import it.
"""
