"""Executing a plan: in this process, or on Ray.

    executor   what both twins do; what they share
    local      in this process, without Ray: for debugging, for tests, for a machine with one device
    schedule   on Ray: Tune schedules, Train's long-lived worker groups train, a broker leases them the runs
    broker     who trains what: plain asyncio, no Ray in it
    workers    a worker group: leases a run, trains it, leases the next
    trials     a Tune trial: opens a run at the broker, and reports its metrics
    cluster    connect to a cluster, or start one here; how many groups it holds
    submit     a sweep as a Ray job
    run        a sweep from its start to its table, whichever twin executes it
    progress   what a person sees meanwhile

No other package imports ray, and importing this one does not.
"""
