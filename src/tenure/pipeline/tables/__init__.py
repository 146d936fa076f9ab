"""Tables made from events: attempts, jobs, hourly metrics, latencies, and who met the target."""
