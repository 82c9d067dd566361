"""Model servers that share one card: how long the first token of a suspended one takes."""
