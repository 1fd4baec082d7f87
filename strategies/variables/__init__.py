"""Variables that live on tasks, whole or in parts, read and updated from all tasks."""
