"""What a model loses when layers keep only some keys and values, against its own dense cache."""
