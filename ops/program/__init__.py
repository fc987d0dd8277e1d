"""3. Program: a call of the loss as steps over buffers, which one interpreter runs."""
