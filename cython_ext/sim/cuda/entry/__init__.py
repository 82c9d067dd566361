"""How a program reaches the simulated driver's functions."""
