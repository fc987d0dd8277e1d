"""3. Strategy: the order of the steps of a forward and a backward."""
