"""Execution of a plan: in this process, or on Ray.

    executor   the interface of both executors, and what they share
    local      executor in this process, without Ray: for debugging, tests, and machines with one device
    schedule   executor on Ray: Tune schedules trials, Train's long-lived worker groups train, a broker connects them
    broker     assigns runs to worker groups: plain asyncio, independent of Ray
    workers    a worker group: leases a run, trains it, leases the next
    trials     a Tune trial: opens its run at the broker and reports the run's metrics
    cluster    connects to a Ray cluster or starts one; computes how many groups it holds
    plugins    ships the plugin modules of an ablation to the processes of a cluster
    submit     submits a sweep as a Ray job
    sweep      one execution of a plan with either executor, and its record

No other package imports ray. Importing this package does not import it.
"""
