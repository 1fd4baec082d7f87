"""Messages between any two ranks at any time, for services in another thread."""
