"""What happened on a GPU: recorded (``collect``, ``recording``), looked into (``spans``), written for Perfetto
(``chrome``) and drawn (``picture``)."""
