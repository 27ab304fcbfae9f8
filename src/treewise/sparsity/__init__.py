"""Which keys and values a layer keeps: policies made of a scorer, an allocator, a trigger and an action."""
