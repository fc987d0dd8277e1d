"""2. Plan: a problem and a memory budget to a plan; pure Python, without torch."""
