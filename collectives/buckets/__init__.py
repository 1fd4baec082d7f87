"""Steps of many arrays, reduced a bucket at a time while the caller computes."""
