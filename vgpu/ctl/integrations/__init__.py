"""The commands for what else starts programs: container engines, Slurm, Jupyter."""
