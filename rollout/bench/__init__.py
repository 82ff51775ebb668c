"""`rollout bench`: how long a model takes for batches of known shape, and how near that is to what the machine can do."""
