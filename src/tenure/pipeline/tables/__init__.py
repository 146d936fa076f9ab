"""Tables made from events: attempts, jobs, hourly metrics, latencies, service levels."""
