"""The read side: what can be asked about ablations, runs and sweeps; it writes nothing but the files it is asked for.

tables     frames of runs, statistics over seeds, and tables in all their formats
figures    data of figures, and their drawings
reports    the evidence of ablations, and one document of all
queries    the answers to the questions of `cope_sweep.api`
"""
