-- PostgreSQL's first start makes the database of the index; this one is MLflow's.
CREATE DATABASE mlflow;
