"""Reads ablations, runs and sweeps. It never changes a store of runs.

tables     frames of runs, statistics over seeds, and tables in all formats
figures    the data of figures, and their drawings
reports    reports on ablations, and one document with all reports
queries    answers to the questions of `cope_sweep.api`
"""
