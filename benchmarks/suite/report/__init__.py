"""From measurements to tables. Nothing here needs a GPU."""
