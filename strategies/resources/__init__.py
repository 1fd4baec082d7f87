"""Named state of a model: variables, and what will live on tasks beside them."""
