"""A small GPT, text data, batch arithmetic, the training loop, and the comparison of strategies."""
