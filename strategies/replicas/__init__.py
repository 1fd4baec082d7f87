"""The copies of a model in this process: whose code runs, what they hold, and how they meet."""
