"""Metrics of a node for Prometheus: each described once (``definitions``), written down (``exposition``), fetched
(``source``), and served (``routes``, ``serve``)."""
