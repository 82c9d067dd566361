"""The order of requests that wait for room."""
