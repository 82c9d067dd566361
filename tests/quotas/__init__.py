"""Quotas: which section holds, what fits, what is idle."""
