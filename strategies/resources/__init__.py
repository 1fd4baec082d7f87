"""Named state: variables of replicas, and what lives on tasks and is used from others."""
