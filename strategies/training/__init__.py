"""What surrounds the training loop: checkpoints, metrics and progress."""
