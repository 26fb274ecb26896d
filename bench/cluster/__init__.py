"""Multi-node training on a Slurm cluster of namespaces: ``python -m bench.cluster``."""
