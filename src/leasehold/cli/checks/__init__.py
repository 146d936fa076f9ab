"""What `leasehold doctor` looks at: this machine, the stores, the queues."""
