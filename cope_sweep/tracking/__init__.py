"""The copy of a store in MLflow. The only package that imports mlflow.

`sync` sends runs and sweeps: in the command `cope-sweep sync`, and in the process `beside` a sweep. `mlflow` is the
tracker; tests also send to one in memory.
"""
