"""Experiments on a GPU: each answered one question, and its answer is now a constant, a design or a road not taken.

README.md in this folder lists questions and answers. No part of the suite (``benchmarks/suite``) imports an experiment.
"""
