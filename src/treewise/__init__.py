"""treewise decodes trees."""
