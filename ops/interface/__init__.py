"""1. Call: from a user's arguments to the operators."""
