"""What `leasehold doctor` looks at: this machine, a Redis server, a `streams` queue."""
