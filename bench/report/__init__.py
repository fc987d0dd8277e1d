"""From recorded data to plots and tables."""
