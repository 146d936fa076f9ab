"""The HTTP gateway of the queues: endpoints, event streams, API keys, dashboard."""
