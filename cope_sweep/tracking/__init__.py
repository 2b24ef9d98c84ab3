"""The copy of a store in MLflow. The only package that imports mlflow, and only once there is something to send."""
