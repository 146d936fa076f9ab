"""The web application before the queues: HTTP in, server-sent events out."""
