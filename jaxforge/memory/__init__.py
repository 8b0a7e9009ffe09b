"""What a backward pass finds kept, computes again, or fetches from host memory."""
