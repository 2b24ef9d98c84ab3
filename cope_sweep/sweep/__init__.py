"""Execution of a plan: in this process, or on Ray.

    executor        the interface of both executors, and what they share: training a run under its lease
    local           executor in this process, without Ray: for debugging, tests, and machines with one device
    ray_executor    executor on Ray: Tune schedules trials, this process follows them
    trial           a Tune trial, which trains a run with Ray Train
    schedulers      Tune's schedulers for the schedule of an ablation
    search          Tune's search for the suggestions of Optuna
    suggestions     the rows that a search suggests during a sweep, and its record
    probe           measures runs before a sweep
    cluster         connects to a Ray cluster or starts one; what nodes have room for
    plugins         ships the plugin modules of an ablation to the processes of a cluster
    parents         the finished, shorter runs that runs continue
    submission      what is submitted to a cluster, and its record
    submit          the Ray job that executes it
    sweep           one execution of a plan with either executor, its budget
    record          its record

No other package imports ray. Importing this package does not import it.
"""
