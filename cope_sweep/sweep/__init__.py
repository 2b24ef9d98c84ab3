"""Execution of a plan: in this process, or on Ray.

    executor        the interface of both executors, and what they share
    local           executor in this process, without Ray: for debugging, tests, and machines with one device
    schedule        executor on Ray: Tune schedules trials, worker groups train, a broker connects them
    broker          takes the leases and assigns runs to worker groups: plain asyncio, independent of Ray
    broker_runs     the runs that the broker knows, and their queues
    broker_groups   the groups that it knows, and what they train
    broker_records  leases and ends of runs, in the store
    broker_state    what else it keeps: a run, a queue, trials that start, events
    shapes          the kinds of resources of a sweep's runs, numbered
    placement       decides how many groups of each shape there are: independent of Ray
    messages        what broker, groups, trials and driver exchange
    groups          starts worker groups where the cluster has room, replaces those that fail, leaves out bad nodes
    workers         a worker: leases a run, trains it, leases the next
    trials          a Tune trial: reports the evaluations of its run
    schedulers      Tune's schedulers for the schedule of an ablation
    search          Tune's search for the suggestions of Optuna
    suggestions     the rows that a search suggests during a sweep, and its record
    probe           measures runs before a sweep
    cluster         connects to a Ray cluster or starts one; what nodes have room for
    plugins         ships the plugin modules of an ablation to the processes of a cluster
    submit          submits a sweep as a Ray job
    sweep           one execution of a plan with either executor, its budget and its record

No other package imports ray. Importing this package does not import it.
"""
