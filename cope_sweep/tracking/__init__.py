"""The copy of a store in MLflow. The only package that imports mlflow, and only once there is something to send.

`sync` is the loop, of the command `cope-sweep sync` and of the process `beside` a sweep; `send` sends one run or sweep.
"""
