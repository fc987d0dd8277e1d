"""What experiments share: problems, timers, records."""
