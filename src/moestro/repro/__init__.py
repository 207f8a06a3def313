"""Papers' experiments on virtual time, in one frame.

A folder here is a paper. Its `experiment.py` defines `make_experiment(settings)`, which returns an `Experiment`.
The docstring of the folder is the help of the verb `moestro repro FOLDER`. A folder that needs flags of its own names
their dataclass `SETTINGS`. `experiment.Experiment` fits any paper; `experiment.GridExperiment` does most of the work for one
that serves loads at rates by several systems under several seeds.
"""
