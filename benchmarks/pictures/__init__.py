"""Pictures for the documents, taken of a running node."""
