"""Named things on a task, used from other tasks: messages, the service behind them, functions."""
