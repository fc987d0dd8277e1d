"""The order in which clusters compute tiles."""
