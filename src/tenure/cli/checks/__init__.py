"""What `tenure doctor` looks at: this machine, the stores, the queues."""
