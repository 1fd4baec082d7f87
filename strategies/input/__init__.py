"""From files to batches: queues, readers, threads, and each rank's share."""
